// What the host engine fetches early: copies by a thread of its own beside what computes, piece by piece, so that they
// give way to what a router has chosen (kernel_early.h is the same on a GPU).

#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <thread>

namespace spark {

class early_copies {
  public:
    early_copies() : worker([this] { work(); }) {}
    ~early_copies() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            ending = true;
        }
        changed.notify_all();
        worker.join();
    }
    early_copies(const early_copies &) = delete;
    early_copies & operator=(const early_copies &) = delete;

    // Copies to a slot, one call of `piece` for each of 0 to n_pieces - 1.
    void submit(uint32_t slot, size_t n_pieces, std::function<void(size_t)> piece) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            copies.push_back({slot, n_pieces, 0, std::move(piece)});
        }
        changed.notify_all();
    }
    // Until all of it is there, or what goes to one slot.
    void land() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return copies.empty(); });
    }
    void land(uint32_t slot) {
        std::unique_lock<std::mutex> lock(mutex);
        const auto copy = to(slot);
        if (copy != copies.end()) {
            copies.splice(copies.begin(), copies, copy);  // before what nobody waits for
        }
        changed.wait(lock, [this, slot] { return to(slot) == copies.end(); });
    }
    // Nothing is copied to the slot any more.
    void end(uint32_t slot) {
        std::unique_lock<std::mutex> lock(mutex);
        const auto copy = to(slot);
        if (copy == copies.end()) {
            return;
        }
        if (&*copy != copying) {
            copies.erase(copy);
            return;
        }
        copy->n_pieces = copy->done;
        changed.wait(lock, [this, slot] { return to(slot) == copies.end(); });
    }
    // No piece is being copied, and none is begun, while one of these is there.
    class hold {
      public:
        explicit hold(early_copies * of) : of(of) {
            if (of != nullptr) {
                std::unique_lock<std::mutex> lock(of->mutex);
                of->held++;
                of->changed.wait(lock, [this] { return this->of->copying == nullptr; });
            }
        }
        ~hold() {
            if (of != nullptr) {
                const std::lock_guard<std::mutex> lock(of->mutex);
                of->held--;
                of->changed.notify_all();
            }
        }
        hold(const hold &) = delete;
        hold & operator=(const hold &) = delete;

      private:
        early_copies * of;
    };

  private:
    struct copy {
        uint32_t slot;
        size_t n_pieces, done;
        std::function<void(size_t)> piece;
    };
    std::mutex mutex;
    std::condition_variable changed;
    std::list<copy> copies;  // best guess first
    const copy * copying = nullptr;
    int held = 0;
    bool ending = false;
    std::thread worker;  // last: it uses all of the above

    std::list<copy>::iterator to(uint32_t slot) {
        auto found = copies.begin();
        while (found != copies.end() && found->slot != slot) {
            ++found;
        }
        return found;
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            changed.wait(lock, [this] { return ending || (held == 0 && !copies.empty()); });
            if (ending) {
                return;
            }
            const auto first = copies.begin();
            const size_t number = first->done++;
            copying = &*first;
            lock.unlock();
            first->piece(number);
            lock.lock();
            copying = nullptr;
            if (first->done >= first->n_pieces) {
                copies.erase(first);
            }
            changed.notify_all();
        }
    }
};

}  // namespace spark
