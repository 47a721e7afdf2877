// Compare many words of memory with what they held before: runtime/words.py.
//
// A level holds n addresses, then the n words that lay there. The words of a level are
// read only if those of every level before it are as they were: they may be what points
// at it. Before that the caches are asked for all of them at once: a program has just
// filled these with other data, and the processor waits for many words at a time.

#include <Python.h>

#include <cstdint>

static PyObject* kernel(PyObject*, PyObject* table) {
    const auto* levels = static_cast<const int64_t*>(PyLong_AsVoidPtr(table));
    if (levels == nullptr) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no table");
        return nullptr;
    }
    const int64_t count = *levels++;
    const int64_t* level = levels;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t n = *level++;
        for (int64_t j = 0; j < n; ++j) {
            // Never faults, wherever an address that is out of date may point.
            __builtin_prefetch(reinterpret_cast<const void*>(level[j]));
        }
        level += 2 * n;
    }
    level = levels;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t n = *level++;
        int64_t differing = 0;
        for (int64_t j = 0; j < n; ++j) {
            differing |= *reinterpret_cast<const int64_t*>(level[j]) ^ level[n + j];
        }
        if (differing != 0) Py_RETURN_TRUE;
        level += 2 * n;
    }
    Py_RETURN_FALSE;
}

static PyMethodDef methods[] = {
    {"kernel", kernel, METH_O, "True if a word isn't what the table says."},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods};

PyMODINIT_FUNC PyInit_kernel() { return PyModule_Create(&definition); }
