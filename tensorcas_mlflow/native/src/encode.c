/* Batches of chunks: encode. */
#include "methods.h"

PyMethodDef tc_encode_methods[] = {{NULL, NULL, 0, NULL}};
