// A minimal test framework: checks that stop the program, and tests that register themselves.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

struct Test {
    const char *name;
    void (*body)();
};

inline std::vector<Test> &tests() {
    static std::vector<Test> all;
    return all;
}

#define TEST(name)                                                           \
    static void name();                                                      \
    static const bool registered_##name = (tests().push_back({#name, name}), true); \
    static void name()

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                 \
        }                                                                                 \
    } while (false)
