#include "host.h"

Integers arg_max(const Integers & values, size_t size, size_t inner, bool takes_last) {
    Integers found;
    for (size_t outer = 0; outer < values.size(); outer += size * inner) {
        for (size_t i = outer; i < outer + inner; i++) {
            size_t best = 0;
            for (size_t at = 1; at < size; at++) {
                const int64_t value = values[i + at * inner], largest = values[i + best * inner];
                if (value > largest || (takes_last && value == largest)) {
                    best = at;
                }
            }
            found.push_back(static_cast<int64_t>(best));
        }
    }
    return found;
}

Integers concat(size_t outer, std::initializer_list<Part> parts) {
    Integers found;
    for (size_t i = 0; i < outer; i++) {
        for (const Part & part : parts) {
            for (size_t at = 0; at < part.size; at++) {
                found.push_back(part.values[i * part.size + at]);
            }
        }
    }
    return found;
}

Integers row_numbers(const Integers & indices, const Integers & sizes) {
    Integers found;
    for (size_t i = 0; i < indices.size(); i += sizes.size()) {
        int64_t row = 0;
        for (size_t axis = 0; axis < sizes.size(); axis++) {
            const int64_t given = indices[i + axis];
            const int64_t index = given < 0 ? given + sizes[axis] : given;
            if (index < 0 || index >= sizes[axis]) {
                throw Failure("the index " + std::to_string(given) + " is beyond " + std::to_string(sizes[axis]));
            }
            row = row * sizes[axis] + index;
        }
        found.push_back(row);
    }
    return found;
}
