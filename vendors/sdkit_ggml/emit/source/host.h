// Operators of ONNX on a few integers, which the processor computes before the graph runs.
#pragma once

#include <initializer_list>
#include <vector>

#include "arrays.h"

// Integers of fewer than 64 bits wrap around, as they do in the model.
template <typename T> Integers cast(const Integers & values) {
    Integers found;
    for (int64_t value : values) {
        found.push_back(static_cast<T>(value));
    }
    return found;
}

template <> inline Integers cast<bool>(const Integers & values) {
    Integers found;
    for (int64_t value : values) {
        found.push_back(value != 0);
    }
    return found;
}

// Combines two arrays of one size, of which either may hold one value for all.
template <typename Operation> Integers combine(const Integers & a, const Integers & b, Operation operation) {
    Integers found(a.size() == 1 ? b.size() : a.size());
    for (size_t i = 0; i < found.size(); i++) {
        found[i] = operation(a[a.size() == 1 ? 0 : i], b[b.size() == 1 ? 0 : i]);
    }
    return found;
}

// Where the largest of `size` values lies, of which neighbours are `inner` apart.
Integers arg_max(const Integers & values, size_t size, size_t inner, bool takes_last);

struct Part {
    const Integers & values;
    size_t size;  // along the axis, times what is inside of it
};

Integers concat(size_t outer, std::initializer_list<Part> parts);

// Indices into a table of these sizes -> numbers of its rows.
Integers row_numbers(const Integers & indices, const Integers & sizes);
