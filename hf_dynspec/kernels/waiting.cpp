// Waits for another thread by looking for what it has done, so that it need not wake this one. Python lets its other
// threads run meanwhile.

#include <cstdint>
#include <ctime>

// Wait until a number differs from what was seen of it: look `most_looks` times, with pauses, of less than a second each.
// Returns whether it differs.
extern "C" bool wait_for_change(const int64_t* number, int64_t seen, int64_t pause_nanoseconds, int64_t most_looks) {
    const timespec pause = {0, pause_nanoseconds};
    for (int64_t look = 0; look < most_looks; ++look) {
        if (__atomic_load_n(number, __ATOMIC_ACQUIRE) != seen) return true;
        nanosleep(&pause, nullptr);
    }
    return __atomic_load_n(number, __ATOMIC_ACQUIRE) != seen;
}
