// Memory for tables that are read all over: in huge pages where the system has them, and from the start of a cache line on.

#pragma once

#include <cstddef>
#include <limits>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace spark {

constexpr size_t CACHE_LINE_BYTES = 64;
constexpr size_t HUGE_PAGE_BYTES = size_t(2) << 20;  // of x86-64, and of AArch64 with pages of 4 KiB

// An allocator for std::vector. Whether pages are huge makes a difference to time alone, so nobody is told.
template <typename type> struct huge_memory {
    using value_type = type;

    huge_memory() = default;
    template <typename other> huge_memory(const huge_memory<other> &) {}

    type * allocate(size_t n) {
        if (n > std::numeric_limits<size_t>::max() / sizeof(type)) {
            throw std::bad_array_new_length();
        }
        void * memory = ::operator new(n * sizeof(type), alignment(n));
#if defined(MADV_HUGEPAGE)
        const size_t huge = n * sizeof(type) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        if (huge > 0) {
            madvise(memory, huge, MADV_HUGEPAGE);
        }
#endif
        return static_cast<type *>(memory);
    }

    void deallocate(type * memory, size_t n) { ::operator delete(memory, alignment(n)); }

    template <typename other> bool operator==(const huge_memory<other> &) const { return true; }
    template <typename other> bool operator!=(const huge_memory<other> &) const { return false; }

  private:
    static std::align_val_t alignment(size_t n) {
        return std::align_val_t(n * sizeof(type) < HUGE_PAGE_BYTES ? CACHE_LINE_BYTES : HUGE_PAGE_BYTES);
    }
};

}  // namespace spark
