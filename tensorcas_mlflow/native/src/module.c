/* The extension module `tensorcas_mlflow.native._core`. */
#include "frames.h"
#include "methods.h"

static PyMethodDef *const TABLES[] = {tc_hash_methods,   tc_decode_methods, tc_encode_methods,
                                      tc_header_methods, tc_cut_methods,    tc_deflate_methods};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    int fails = PyModule_AddStringConstant(module, "ZSTD_VERSION", tc_zstd_version()) < 0;
    for (size_t table = 0; table < sizeof TABLES / sizeof *TABLES && !fails; table++)
        fails = PyModule_AddFunctions(module, TABLES[table]) < 0;
    if (fails) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
