/* Batches of chunks: decode. */
#include "methods.h"

PyMethodDef tc_decode_methods[] = {{NULL, NULL, 0, NULL}};
