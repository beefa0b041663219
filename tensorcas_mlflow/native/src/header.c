/* The header of a safetensors file as columns: one pass over its text, without an object for each tensor.

   `list_header` reads what every writer of the format writes. It returns None for any other text, valid or not, and the
   caller reads that one tensor by tensor and says what is wrong with it. */
#include "methods.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SIDES = 64, MOST_NAME = 4096, MOST_KINDS = 64, MOST_PROBES = 64, MOST_DIGITS = 18, USUAL_SIDES = 8 };
static const int64_t MOST_TENSORS = 1 << 20;
static const int64_t MOST_TENSOR_BYTES = (int64_t)1 << 56;
static const uint64_t FACTOR = 0x9e3779b97f4a7c15u;

typedef struct {
    int64_t name, name_end; /* in the header */
    int64_t begin, end;     /* of the tensor's bytes */
    int64_t sides_end;      /* among all sides */
    uint8_t kind;
} Entry;

typedef struct {
    const uint8_t *text;
    int64_t at, length;
    const uint8_t *kinds; /* names of dtypes, each with a space behind it */
    int64_t kinds_length;
    const uint8_t *item_bytes; /* one for each dtype */
    int64_t metadata, metadata_end;
    Entry *entries;
    int64_t count, room;
    int64_t *sides;
    int64_t n_sides, sides_room;
    int64_t names_length;
    int has_memory;
} Scan;

static void skip_space(Scan *scan) {
    while (scan->at < scan->length) {
        uint8_t c = scan->text[scan->at];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t')
            return;
        scan->at++;
    }
}

/* Skip white space and one character; return 0 if another one follows. */
static int take(Scan *scan, uint8_t wanted) {
    skip_space(scan);
    if (scan->at >= scan->length || scan->text[scan->at] != wanted)
        return 0;
    scan->at++;
    return 1;
}

static int take_key(Scan *scan, const char *key, int64_t length) {
    if (!take(scan, '"') || scan->length - scan->at < length + 1)
        return 0;
    if (memcmp(scan->text + scan->at, key, (size_t)length) != 0 || scan->text[scan->at + length] != '"')
        return 0;
    scan->at += length + 1;
    return take(scan, ':');
}

static int take_number(Scan *scan, int64_t *number) {
    skip_space(scan);
    int64_t begin = scan->at, value = 0;
    while (scan->at < scan->length && scan->text[scan->at] >= '0' && scan->text[scan->at] <= '9') {
        if (scan->at - begin == MOST_DIGITS)
            return 0;
        value = 10 * value + (scan->text[scan->at++] - '0');
    }
    *number = value;
    return scan->at > begin && (scan->text[begin] != '0' || scan->at == begin + 1);
}

/* Take a text of printable ASCII without a backslash; return 0 for any other. */
static int take_text(Scan *scan, int64_t *begin, int64_t *end) {
    if (!take(scan, '"'))
        return 0;
    *begin = scan->at;
    while (scan->at < scan->length) {
        uint8_t c = scan->text[scan->at];
        if (c == '"') {
            *end = scan->at++;
            return 1;
        }
        if (c < 0x20 || c > 0x7e || c == '\\')
            return 0;
        scan->at++;
    }
    return 0;
}

/* Take the metadata's texts, with any characters in them: the caller parses them. */
static int take_metadata(Scan *scan) {
    skip_space(scan);
    scan->metadata = scan->at;
    if (!take(scan, '{'))
        return 0;
    if (!take(scan, '}'))
        for (;;) {
            for (int half = 0; half < 2; half++) {
                if ((half == 1 && !take(scan, ':')) || !take(scan, '"'))
                    return 0;
                while (scan->at < scan->length && scan->text[scan->at] != '"') {
                    if (scan->text[scan->at] < 0x20)
                        return 0;
                    scan->at += scan->text[scan->at] == '\\' ? 2 : 1;
                }
                if (scan->at >= scan->length)
                    return 0;
                scan->at++;
            }
            if (take(scan, '}'))
                break;
            if (!take(scan, ','))
                return 0;
        }
    scan->metadata_end = scan->at;
    return 1;
}

static int take_kind(Scan *scan, uint8_t *kind) {
    int64_t begin, end;
    if (!take_text(scan, &begin, &end))
        return 0;
    int64_t at = 0, length = end - begin;
    for (int number = 0; number < MOST_KINDS && at < scan->kinds_length; number++) {
        const uint8_t *space = memchr(scan->kinds + at, ' ', (size_t)(scan->kinds_length - at));
        if (space == NULL)
            return 0;
        int64_t next = space - scan->kinds;
        if (next - at == length && memcmp(scan->kinds + at, scan->text + begin, (size_t)length) == 0) {
            *kind = (uint8_t)number;
            return 1;
        }
        at = next + 1;
    }
    return 0;
}

/* Make room for one more entry with the most sides. */
static int make_room(Scan *scan) {
    if (scan->count == scan->room) {
        int64_t room = scan->room ? 2 * scan->room : 64;
        Entry *entries = realloc(scan->entries, (size_t)room * sizeof *entries);
        if (entries == NULL)
            return scan->has_memory = 0;
        scan->entries = entries;
        scan->room = room;
    }
    if (scan->n_sides + MOST_SIDES > scan->sides_room) {
        int64_t room = 2 * scan->sides_room + 2 * MOST_SIDES;
        int64_t *sides = realloc(scan->sides, (size_t)room * sizeof *sides);
        if (sides == NULL)
            return scan->has_memory = 0;
        scan->sides = sides;
        scan->sides_room = room;
    }
    return 1;
}

/* Take the shape and return the tensor's size; -1 if it is not possible. */
static int64_t take_shape(Scan *scan, int64_t item_bytes) {
    int64_t product = item_bytes, first = scan->n_sides;
    int is_empty = 0;
    if (!take(scan, '['))
        return -1;
    if (take(scan, ']'))
        return product;
    for (;;) {
        int64_t side;
        if (scan->n_sides - first == MOST_SIDES || !take_number(scan, &side))
            return -1;
        scan->sides[scan->n_sides++] = side;
        if (side == 0)
            is_empty = 1;
        else if (side > MOST_TENSOR_BYTES / product)
            return -1;
        else
            product *= side;
        if (take(scan, ']'))
            return is_empty ? 0 : product;
        if (!take(scan, ','))
            return -1;
    }
}

static int take_entry(Scan *scan) {
    /* Sides take more memory as numbers than as text, so there may not be many. */
    if (scan->count == MOST_TENSORS || scan->n_sides > USUAL_SIDES * (scan->count + 8) || !make_room(scan))
        return 0;
    Entry entry;
    if (!take_text(scan, &entry.name, &entry.name_end) || !take(scan, ':'))
        return 0;
    int64_t length = entry.name_end - entry.name;
    /* The names that mean something to us begin so; the caller looks at them. */
    if (length == 0 || length > MOST_NAME || (length > 1 && memcmp(scan->text + entry.name, "__", 2) == 0))
        return 0;
    if (!take(scan, '{') || !take_key(scan, "dtype", 5) || !take_kind(scan, &entry.kind))
        return 0;
    if (!take(scan, ',') || !take_key(scan, "shape", 5))
        return 0;
    int64_t n_bytes = take_shape(scan, scan->item_bytes[entry.kind]);
    if (n_bytes < 0 || !take(scan, ',') || !take_key(scan, "data_offsets", 12) || !take(scan, '['))
        return 0;
    if (!take_number(scan, &entry.begin) || !take(scan, ',') || !take_number(scan, &entry.end))
        return 0;
    if (!take(scan, ']') || !take(scan, '}') || entry.end - entry.begin != n_bytes)
        return 0;
    entry.sides_end = scan->n_sides;
    scan->names_length += length;
    scan->entries[scan->count++] = entry;
    return 1;
}

/* Tell whether no two names are equal. A text made to fill few places of the table counts as one with equal names. */
static int names_differ(Scan *scan) {
    size_t size = 64;
    while (size < 2 * (size_t)scan->count)
        size *= 2;
    uint32_t *table = calloc(size, sizeof *table);
    if (table == NULL)
        return scan->has_memory = 0;
    int differ = 1;
    for (int64_t number = 0; number < scan->count && differ; number++) {
        const Entry *entry = scan->entries + number;
        size_t length = (size_t)(entry->name_end - entry->name);
        const uint8_t *name = scan->text + entry->name;
        uint64_t hash = length;
        for (size_t at = 0; at < length; at += 8) {
            uint64_t word = 0;
            memcpy(&word, name + at, length - at < 8 ? length - at : 8);
            hash = (hash ^ word) * FACTOR;
            hash ^= hash >> 29;
        }
        size_t place = (size_t)(hash * FACTOR >> 32) & (size - 1), n_probes = 0;
        while (table[place] != 0 && differ) {
            const Entry *other = scan->entries + (table[place] - 1);
            if (++n_probes > MOST_PROBES)
                differ = 0;
            else if ((size_t)(other->name_end - other->name) == length &&
                     memcmp(scan->text + other->name, name, length) == 0)
                differ = 0;
            place = (place + 1) & (size - 1);
        }
        table[place] = (uint32_t)(number + 1);
    }
    free(table);
    return differ;
}

static int scan_all(Scan *scan) {
    if (scan->length == 0 || scan->text[0] != '{')
        return 0;
    scan->at = 1;
    int64_t before = scan->at;
    int has_metadata = take_key(scan, "__metadata__", 12);
    if (!has_metadata)
        scan->at = before;
    else if (!take_metadata(scan) || !take(scan, ','))
        return 0;
    do {
        if (!take_entry(scan))
            return 0;
    } while (take(scan, ','));
    if (!take(scan, '}'))
        return 0;
    skip_space(scan);
    return scan->at == scan->length && names_differ(scan);
}

static PyObject *new_bytes(int64_t count, size_t size, void *data) {
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)((size_t)count * size));
    if (made != NULL)
        *(char **)data = PyBytes_AsString(made);
    return made;
}

/* Return (metadata, end, names, name_at, kind, side_at, sides, begin, end): the columns are native int64, kinds bytes. */
static PyObject *columns_of(const Scan *scan) {
    int64_t *name_at, *side_at, *sides, *begins, *ends, n_before = 0;
    uint8_t *names, *kind;
    PyObject *made[7] = {
        new_bytes(scan->names_length, 1, &names),
        new_bytes(scan->count + 1, 8, &name_at),
        new_bytes(scan->count, 1, &kind),
        new_bytes(scan->count + 1, 8, &side_at),
        new_bytes(scan->n_sides, 8, &sides),
        new_bytes(scan->count, 8, &begins),
        new_bytes(scan->count, 8, &ends),
    };
    int is_made = 1;
    for (int number = 0; number < 7; number++)
        is_made &= made[number] != NULL;
    if (is_made) {
        name_at[0] = side_at[0] = 0;
        for (int64_t number = 0; number < scan->count; number++) {
            const Entry *entry = scan->entries + number;
            int64_t length = entry->name_end - entry->name;
            memcpy(names + n_before, scan->text + entry->name, (size_t)length);
            name_at[number + 1] = n_before += length;
            kind[number] = entry->kind;
            side_at[number + 1] = entry->sides_end;
            begins[number] = entry->begin;
            ends[number] = entry->end;
        }
        if (scan->n_sides > 0)
            memcpy(sides, scan->sides, (size_t)scan->n_sides * sizeof *sides);
        PyObject *result = Py_BuildValue("(LLNNNNNNN)", (long long)scan->metadata, (long long)scan->metadata_end, made[0],
                                         made[1], made[2], made[3], made[4], made[5], made[6]);
        return result;
    }
    for (int number = 0; number < 7; number++)
        Py_XDECREF(made[number]);
    return NULL;
}

static PyObject *list_header(PyObject *module, PyObject *args) {
    Py_buffer header, kinds, item_bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*:list_header", &header, &kinds, &item_bytes))
        return NULL;
    PyObject *result = NULL;
    Scan scan = {.text = header.buf,
                 .length = header.len,
                 .kinds = kinds.buf,
                 .kinds_length = kinds.len,
                 .item_bytes = item_bytes.buf,
                 .has_memory = 1};
    Py_ssize_t n_kinds = 0, n_impossible = 0;
    for (Py_ssize_t at = 0; at < kinds.len; at++)
        n_kinds += ((const char *)kinds.buf)[at] == ' ';
    for (Py_ssize_t at = 0; at < item_bytes.len; at++)
        n_impossible += ((const char *)item_bytes.buf)[at] == 0;
    if (n_kinds != item_bytes.len || n_kinds > MOST_KINDS || n_impossible > 0) {
        PyErr_SetString(PyExc_ValueError, "each dtype has a name with a space behind it, and a size");
    } else {
        int is_usual;
        Py_BEGIN_ALLOW_THREADS;
        is_usual = scan_all(&scan);
        Py_END_ALLOW_THREADS;
        if (!scan.has_memory)
            result = PyErr_NoMemory();
        else
            result = is_usual ? columns_of(&scan) : Py_NewRef(Py_None);
    }
    free(scan.entries);
    free(scan.sides);
    PyBuffer_Release(&header);
    PyBuffer_Release(&kinds);
    PyBuffer_Release(&item_bytes);
    return result;
}

PyMethodDef tc_header_methods[] = {
    {"list_header", list_header, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
