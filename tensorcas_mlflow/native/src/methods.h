/* The tables of functions for Python, one in each file that has some; `module.c` joins them. */
#ifndef TC_METHODS_H
#define TC_METHODS_H

#define Py_LIMITED_API 0x030B0000 /* 3.11, the first whose stable interface has buffers */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyMethodDef tc_hash_methods[];   /* hash.c */
extern PyMethodDef tc_decode_methods[]; /* decode.c */
extern PyMethodDef tc_encode_methods[]; /* encode_methods.c */
extern PyMethodDef tc_header_methods[]; /* header.c */
extern PyMethodDef tc_cut_methods[];    /* cuts.c */
extern PyMethodDef tc_deflate_methods[]; /* deflate.c */

#endif
