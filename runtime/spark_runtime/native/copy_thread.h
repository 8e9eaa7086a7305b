// Copies that go on beside what computes: the host engine's stream for what is fetched early.

#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace spark {

class copy_thread {
  public:
    copy_thread() : worker([this] { work(); }) {}
    ~copy_thread() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            ending = true;
        }
        changed.notify_all();
        worker.join();
    }
    copy_thread(const copy_thread &) = delete;
    copy_thread & operator=(const copy_thread &) = delete;

    void submit(std::function<void()> copy) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            copies.push_back(std::move(copy));
            unfinished++;
        }
        changed.notify_all();
    }
    // Until all of it is done.
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return unfinished == 0; });
    }

  private:
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> copies;
    size_t unfinished = 0;
    bool ending = false;
    std::thread worker;  // last: it uses all of the above

    void work() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            changed.wait(lock, [this] { return ending || !copies.empty(); });
            if (copies.empty()) {
                return;
            }
            const std::function<void()> copy = std::move(copies.front());
            copies.pop_front();
            lock.unlock();
            copy();
            lock.lock();
            unfinished--;
            changed.notify_all();
        }
    }
};

}  // namespace spark
