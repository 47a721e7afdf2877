// What a call on a CPU does besides its program: runtime/words.py, runtime/exact.py.
//
// A program has just filled the processor's caches with its own data, so what counts is
// how much memory a call touches, instructions included. Python tells in tables of words
// what to look at; nothing here knows a model.

#include <Python.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

namespace {

using Word = int64_t;

// Tensors that a call may pass: runtime/exact.py, MOST_ARGUMENTS.
constexpr int MOST_ARGUMENTS = 16;

PyObject* object(Word address) { return reinterpret_cast<PyObject*>(address); }

Word word_at(Word address) { return *reinterpret_cast<const Word*>(address); }

Word class_of(PyObject* value) { return reinterpret_cast<Word>(Py_TYPE(value)); }

// True if a word isn't what a table says.
//
// The table holds a count of levels; a level holds n addresses, then the n words that
// lay there. The words of a level are read only if those of every level before it are
// as they were: they may be what points at it. Before that the caches are asked for all
// of them at once: the processor waits for many words at a time.
bool differs(const Word* table) {
    const Word count = *table++;
    const Word* level = table;
    for (Word i = 0; i < count; ++i) {
        const Word n = *level++;
        for (Word j = 0; j < n; ++j) {
            // Never faults, wherever an address that is out of date may point.
            __builtin_prefetch(reinterpret_cast<const void*>(level[j]));
        }
        level += 2 * n;
    }
    level = table;
    for (Word i = 0; i < count; ++i) {
        const Word n = *level++;
        Word differing = 0;
        for (Word j = 0; j < n; ++j) differing |= word_at(level[j]) ^ level[n + j];
        if (differing != 0) return true;
        level += 2 * n;
    }
    return false;
}

// The table of an entry: this head, `arguments` names with their positions (-1 = none),
// `positional` names, `fixed` names with their values, `buckets` buckets. Objects stand
// there by address, and the caller keeps them.
struct Head {
    Word watched;              // a table for `differs`
    Word deterministic;        // torch's function that tells whether it is on
    Word is_deterministic;     // what it must tell
    Word dual, level, no_level;  // forward-mode AD: a dict, its level's name, none open
    Word included[2];          // the thread's dispatch keys, outside and inside
    Word excluded[2];          // inference mode
    Word tensor_class;
    Word implementation;       // bytes into a tensor: where its TensorImpl is
    Word kind, bits;           // bytes into that: dtype, device, flags; what counts of it
    Word keys;                 // bytes into that: dispatch keys
    Word missed;               // what to return if the call isn't an exact one
    Word arguments, positional, fixed, buckets;
};

// A bucket: this head; for each argument a kind, the keys of a tensor that was made
// outside and inside inference mode, a count, and as many offsets with their words;
// then `inputs` graph inputs (a tensor of the model, or -1 - argument) and `fields`
// names with the output (or -1) and the constant that they get.
struct Bucket {
    Word size;                 // in words, this head included
    Word program;
    Word build;                // makes the result where there is no class
    Word result_class;         // of transformers' ModelOutput, or 0
    Word inputs, fields;
};

// Whether nothing is on that would have an operator do something else.
bool is_plain_thread(const Head& head) {
    if (c10::AutogradState::get_tls_state().get_grad_mode()) return false;
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    const auto included = static_cast<Word>(keys.included_.raw_repr());
    const auto excluded = static_cast<Word>(keys.excluded_.raw_repr());
    for (int i = 0; i < 2; ++i) {
        if (included == head.included[i] && excluded == head.excluded[i]) return true;
    }
    return false;
}

// Whether no look-up among a call's names can run code of its own, which might free what
// `find_tensors` holds: a name of a class derived from str may compare as it likes.
bool are_plain_names(PyObject* kwargs) {
    Py_ssize_t place = 0;
    PyObject* name = nullptr;
    while (PyDict_Next(kwargs, &place, &name, nullptr)) {
        if (!PyUnicode_CheckExact(name)) return false;
    }
    return true;
}

// An argument by position or name; null without an error if the call has none.
PyObject* given(PyObject* args, PyObject* kwargs, Word name, Word position) {
    if (position >= 0 && position < PyTuple_GET_SIZE(args)) {
        return PyTuple_GET_ITEM(args, position);
    }
    return PyDict_GetItemWithError(kwargs, object(name));
}

// Finds the call's tensors; false, perhaps with an error, if it passes anything else.
bool find_tensors(const Head& head, const Word* names, PyObject* args, PyObject* kwargs,
                  PyObject** tensors, Word* implementations) {
    const Word passed = PyTuple_GET_SIZE(args) + PyDict_GET_SIZE(kwargs);
    const bool all = passed == head.arguments + head.fixed;
    if (PyTuple_GET_SIZE(args) > head.positional) return false;
    if (passed != head.arguments && !all) return false;
    if (!are_plain_names(kwargs)) return false;
    for (Word i = 0; i < head.arguments; ++i, names += 2) {
        PyObject* value = given(args, kwargs, names[0], names[1]);
        if (value == nullptr || class_of(value) != head.tensor_class) return false;
        tensors[i] = value;
        implementations[i] = word_at(reinterpret_cast<Word>(value) + head.implementation);
        if (implementations[i] == 0) return false;
    }
    if (!all) return true;
    const Word* positions = names;
    const Word* fixed = names + head.positional;
    for (Word i = 0; i < head.fixed; ++i, fixed += 2) {
        Word position = 0;
        while (position < head.positional && positions[position] != fixed[0]) ++position;
        // True, False and None; an equal number may be another object.
        if (given(args, kwargs, fixed[0], position) != object(fixed[1])) return false;
    }
    return true;
}

// Whether tensors are what a bucket takes; moves `words` behind what it reads.
bool fits(const Head& head, const Word*& words, const Word* implementations) {
    bool fitting = true;
    for (Word i = 0; i < head.arguments && fitting; ++i) {
        const Word start = implementations[i];
        const Word keys = word_at(start + head.keys);
        const Word count = words[3];
        fitting = ((word_at(start + head.kind) ^ words[0]) & head.bits) == 0 &&
                  (keys == words[1] || keys == words[2]);
        words += 4;
        for (Word j = 0; j < count && fitting; ++j) {
            fitting = word_at(start + words[2 * j]) == words[2 * j + 1];
        }
        words += 2 * count;
    }
    return fitting;
}

PyObject* graph_inputs(const Word* words, Word count, PyObject** tensors) {
    PyObject* inputs = PyList_New(count);
    if (inputs == nullptr) return nullptr;
    for (Word i = 0; i < count; ++i) {
        PyObject* input = words[i] < 0 ? tensors[-1 - words[i]] : object(words[i]);
        PyList_SET_ITEM(inputs, i, Py_NewRef(input));
    }
    return inputs;
}

// An attribute for each field, and a key for each that isn't None, as result.py does.
PyObject* model_output(const Bucket& bucket, const Word* fields, PyObject* outputs) {
    auto* type = reinterpret_cast<PyTypeObject*>(bucket.result_class);
    PyObject* empty = PyTuple_New(0);
    PyObject* result = empty == nullptr ? nullptr : type->tp_new(type, empty, nullptr);
    Py_XDECREF(empty);
    if (result == nullptr) return nullptr;
    if (!PyObject_TypeCheck(result, type)) {
        PyErr_Format(PyExc_TypeError, "%s.__new__ made a %s", type->tp_name,
                     Py_TYPE(result)->tp_name);
        Py_DECREF(result);
        return nullptr;
    }
    PyObject* attributes = PyObject_GenericGetDict(result, nullptr);
    bool made = attributes != nullptr;
    for (Word i = 0; i < bucket.fields && made; ++i, fields += 3) {
        PyObject* name = object(fields[0]);
        PyObject* value = object(fields[2]);
        if (fields[1] >= 0) {
            // Borrowed; raises an error if there is none.
            value = PyTuple_GetItem(outputs, fields[1]);
        }
        made = value != nullptr && PyDict_SetItem(attributes, name, value) == 0 &&
               (value == Py_None || PyODict_SetItem(result, name, value) == 0);
    }
    Py_XDECREF(attributes);
    if (!made) Py_CLEAR(result);
    return result;
}

// The result that Python code makes of graph outputs and the call's arguments by name.
PyObject* built(const Bucket& bucket, const Word* positional, PyObject* args,
                PyObject* kwargs, PyObject* outputs) {
    PyObject* values = PyTuple_GET_SIZE(args) == 0 ? Py_NewRef(kwargs) : PyDict_Copy(kwargs);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args) && values != nullptr; ++i) {
        PyObject* value = PyTuple_GET_ITEM(args, i);
        if (PyDict_SetItem(values, object(positional[i]), value) != 0) Py_CLEAR(values);
    }
    if (values == nullptr) return nullptr;
    PyObject* parts[] = {outputs, values, Py_None};
    PyObject* result = PyObject_Vectorcall(object(bucket.build), parts, 3, nullptr);
    Py_DECREF(values);
    return result;
}

PyObject* changed(PyObject*, PyObject* table) {
    const auto* words = static_cast<const Word*>(PyLong_AsVoidPtr(table));
    if (words == nullptr) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no table");
        return nullptr;
    }
    return PyBool_FromLong(differs(words));
}

// (table, what it refers to, positional arguments, named ones) → the call's result, or
// what the table says if the call isn't an exact one.
PyObject* call(PyObject*, PyObject* const* given_to, Py_ssize_t count) {
    if (count != 4 || !PyBytes_Check(given_to[0]) || !PyTuple_Check(given_to[2]) ||
        !PyDict_Check(given_to[3])) {
        PyErr_SetString(PyExc_TypeError, "expected a table, its objects, args, kwargs");
        return nullptr;
    }
    const auto* table = reinterpret_cast<const Word*>(PyBytes_AS_STRING(given_to[0]));
    const auto& head = *reinterpret_cast<const Head*>(table);
    PyObject* args = given_to[2];
    PyObject* kwargs = given_to[3];
    PyObject* missed = object(head.missed);
    PyObject* tensors[MOST_ARGUMENTS];
    Word implementations[MOST_ARGUMENTS];
    if (!is_plain_thread(head)) return Py_NewRef(missed);

    const Word* names = table + sizeof(Head) / sizeof(Word);
    if (!find_tensors(head, names, args, kwargs, tensors, implementations)) {
        return PyErr_Occurred() ? nullptr : Py_NewRef(missed);
    }
    const Word* positional = names + 2 * head.arguments;
    const Word* place = positional + head.positional + 2 * head.fixed;
    const Word* words = nullptr;
    const Bucket* bucket = nullptr;
    for (Word i = 0; i < head.buckets && bucket == nullptr; ++i) {
        const auto* each = reinterpret_cast<const Bucket*>(place);
        words = place + sizeof(Bucket) / sizeof(Word);
        if (fits(head, words, implementations)) bucket = each;
        place += each->size;
    }
    if (bucket == nullptr) return Py_NewRef(missed);

    if (PyDict_GetItemWithError(object(head.dual), object(head.level)) !=
        object(head.no_level)) {
        return PyErr_Occurred() ? nullptr : Py_NewRef(missed);
    }
    PyObject* deterministic = PyObject_CallNoArgs(object(head.deterministic));
    if (deterministic == nullptr) return nullptr;
    Py_DECREF(deterministic);
    if (deterministic != object(head.is_deterministic) ||
        differs(reinterpret_cast<const Word*>(head.watched))) {
        return Py_NewRef(missed);
    }
    PyObject* inputs = graph_inputs(words, bucket->inputs, tensors);
    if (inputs == nullptr) return nullptr;
    PyObject* outputs = PyObject_CallOneArg(object(bucket->program), inputs);
    Py_DECREF(inputs);
    if (outputs == nullptr) return nullptr;
    PyObject* result =
        bucket->result_class != 0 && PyTuple_Check(outputs)
            ? model_output(*bucket, words + bucket->inputs, outputs)
            : built(*bucket, positional, args, kwargs, outputs);
    Py_DECREF(outputs);
    return result;
}

PyMethodDef methods[] = {
    {"changed", changed, METH_O, "True if a word isn't what the table says."},
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
     METH_FASTCALL, "The result of a call that passes a bucket's very tensors."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_kernel() {
    PyObject* module = PyModule_Create(&definition);
    // How tables are written; runtime/program.py uses only what reads its own.
    if (module != nullptr && PyModule_AddIntConstant(module, "tables", 2) != 0) {
        Py_CLEAR(module);
    }
    return module;
}
