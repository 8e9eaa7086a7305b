// Runs a tiered graph on the GPU that the proxy wraps. The tables and the decisions are on the device (kernels.cu); the
// host only launches, and once a decode graph has come twice, it launches all of it at once as one CUDA graph.
//
// Streams: the wrapped backend's own; `decide` for what goes on between its parts; `copies` and `gathers` to bring the
// next layer's experts together while this one computes; `early` for the experts that the next layer is guessed to
// select. Events tie them; ggml's event functions reach the first.

#include "cuda_device.h"
#include "cuda_flows.h"
#include "cuda_graphs.h"
#include "cuda_scratch.h"
#include "cuda_tables.h"

#include <algorithm>
#include <cstring>
#include <deque>

namespace spark {

namespace {

constexpr uint32_t FETCH_BLOCKS = 16;   // enough reads in flight to fill a PCIe 5 link, few enough to start at once
constexpr uint32_t DECIDING_BLOCKS = 1; // writes the tables meanwhile
constexpr uint32_t GATHER_ROWS = 4;     // blocks an expert

class cuda_engine : public engine {
  public:
    cuda_engine(tier & owner, const cuda_driver & driver, CUdevice device, int capability, const std::string & kernels)
        : owner(owner), gpu(driver, device, capability) {
        const cuda::scope scope(gpu);
        try {
            prepare(kernels);
        } catch (...) {
            tidy_up();
            throw;
        }
    }

    ~cuda_engine() override {
        const cuda::scope scope(gpu, std::nothrow);
        tidy_up();
    }

    const char * name() const override { return "cuda"; }

    uint64_t table_bytes() const override {
        uint64_t bytes = 0;
        for (const cuda_tables & state : classes) {
            bytes += state.bytes();
        }
        return bytes;
    }

    void placed() override {
        const cuda::scope scope(gpu);
        CUdeviceptr fault_address;
        gpu.check(gpu.cu.cuMemHostGetDevicePointer(&fault_address, const_cast<int32_t *>(fault), 0), "cuMemHostGetDevicePointer");
        if (classes.empty()) {
            std::deque<cuda_tables> made;
            for (const auto & c : owner.classes) {
                made.emplace_back(gpu, *c, fault_address, urgent.at<uint32_t>());
            }
            classes.swap(made);
        }
        for (cuda_tables & state : classes) {
            state.load_slots(flow->decide);
            state.upload(phase);
        }
        flow->decide.synchronize();
        mirrored = true;
    }

    std::string take_fault() override {
        if (fault[0] == FAULT_NONE) {
            return "";
        }
        const std::string text = "block " + std::to_string(fault[1]) + " selected expert " + std::to_string(fault[2]) + ", expected 0 to " +
                                 std::to_string(fault[3] - 1);
        fault[0] = FAULT_NONE;
        return text;
    }

    void set_phase(int value) override {
        if (value == phase) {
            return;
        }
        const cuda::scope scope(gpu);
        phase = value;
        for (const cuda_tables & state : classes) {
            const CUdeviceptr control = reinterpret_cast<CUdeviceptr>(state.tables.control);
            gpu.check(gpu.cu.cuMemsetD32Async(control + offsetof(device_control, phase), unsigned(value), 1, flow->decide), "cuMemsetD32Async");
        }
    }

    void read() override {
        const cuda::scope scope(gpu);
        gpu.check(gpu.cu.cuCtxSynchronize(), "cuCtxSynchronize");  // a placement may follow, which writes to slots
        for (size_t c = 0; c < classes.size(); c++) {
            classes[c].download(owner.classes[c]->pool);
        }
        mirrored = true;
    }

    void write_recency() override {
        const cuda::scope scope(gpu);
        flow->decide.synchronize();
        for (cuda_tables & state : classes) {
            state.upload_recency();
        }
    }

    void sync_guesses(bool write) override {
        const cuda::scope scope(gpu);
        flow->decide.synchronize();
        for (size_t c = 0; c < classes.size(); c++) {
            write ? classes[c].upload_guesses() : classes[c].download_guesses(owner.classes[c]->pool);
        }
    }

    void reset_counts() override {
        const cuda::scope scope(gpu);
        for (size_t c = 0; c < classes.size(); c++) {
            const device_class & tables = classes[c].tables;
            gpu.check(gpu.cu.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(tables.counts), 0, PHASES * size_t(tables.n_counts) * sizeof(uint64_t), flow->decide),
                      "cuMemsetD8Async");
            owner.classes[c]->pool.reset_counts();
        }
        flow->decide.synchronize();
    }

    ggml_status compute(ggml_backend_t inner, ggml_cgraph * graph) override {
        const cuda::scope scope(gpu);
        check_fault();
        if (CUgraphExec known = graphs->by_number(graph, owner.generation)) {
            return replay(inner, known);
        }
        const std::vector<expert_call> calls = find_calls(owner, graph);
        for (const expert_call & call : calls) {
            cuda_tables & state = state_of(*call.layer);
            const size_t n_ids = size_t(call.n_used()) * call.n_tokens();
            if (state.room < n_ids) {
                gpu.check(gpu.cu.cuCtxSynchronize(), "cuCtxSynchronize");  // the step before may still read its ids
                state.make_room(n_ids);
                owner.generation++;
            }
        }
        if (!std::all_of(calls.begin(), calls.end(), [&](const expert_call & call) { return way_of(call) != way::around; }) ||
            !cuda_graphs::can_capture(graph, gpu.capability)) {
            return run_and_count(inner, graph, calls);
        }
        cuda_graphs::entry & entry = graphs->by_content(graph, owner.generation);
        if (entry.exec != nullptr) {
            return replay(inner, entry.exec);
        }
        // The first time, the wrapped backend makes what its kernels need, which it could not all do while capturing; a
        // context that has grown needs no more than before.
        const bool first = entry.computed++ == 0;
        if ((first && !graphs->familiar(entry)) || entry.refused) {
            return run_and_count(inner, graph, calls);
        }
        if (!capture(inner, graph, calls, entry)) {
            entry.refused = !first;
            return run_and_count(inner, graph, calls);
        }
        return replay(inner, entry.exec);
    }

  private:
    tier & owner;
    cuda gpu;
    CUmodule module = nullptr;
    CUfunction ensure = nullptr, mark = nullptr, gather = nullptr, tally = nullptr, choose = nullptr, copy = nullptr, learn = nullptr;
    std::unique_ptr<flows> flow;
    std::unique_ptr<host_lock> locked;
    volatile int32_t * fault = nullptr;
    device_array urgent;  // device_class::urgent
    char * host = nullptr;  // owner.host as the GPU sees it
    std::deque<cuda_tables> classes;  // as owner.classes
    std::unique_ptr<cuda_graphs> graphs;
    int phase = 0;  // of the steps to come
    cuda_scratch scratch_layers{gpu};
    bool torn = false;  // cuda_early::torn, in a step that was computed
    bool mirrored = false;  // whether slot_of on the host is what the device has
    uint64_t touch = 0;

    void prepare(const std::string & kernels) {
        locked = std::make_unique<host_lock>(gpu, owner.host, owner.host_bytes);  // first, because it may well fail
        host = locked->as_seen;
        gpu.check(gpu.cu.cuModuleLoadData(&module, kernels.data()), "cuModuleLoadData");
        for (const auto & [function, name] : {std::pair{&ensure, "spark_ensure"}, {&mark, "spark_mark"}, {&gather, "spark_gather"}, {&tally, "spark_tally"},
                                             {&choose, "spark_choose_early"}, {&copy, "spark_copy_early"}, {&learn, "spark_learn"}}) {
            gpu.check(gpu.cu.cuModuleGetFunction(function, module, name), name);
        }
        void * memory;
        gpu.check(gpu.cu.cuMemHostAlloc(&memory, 4 * sizeof(int32_t), CU_MEMHOSTALLOC_DEVICEMAP), "cuMemHostAlloc");
        fault = static_cast<volatile int32_t *>(memory);
        for (int i = 0; i < 4; i++) {
            fault[i] = 0;
        }
        urgent.allocate(gpu, sizeof(uint32_t));
        flow = std::make_unique<flows>(gpu, owner.inner);
        graphs = std::make_unique<cuda_graphs>(gpu, std::vector<CUfunction>{ensure, mark, choose, copy});
        owner.pinned = true;
    }

    void tidy_up() {
        graphs.reset();
        flow.reset();
        classes.clear();
        urgent.release();
        if (fault != nullptr) {
            gpu.cu.cuMemFreeHost(const_cast<int32_t *>(fault));
        }
        locked.reset();
        owner.pinned = false;
        if (module != nullptr) {
            gpu.cu.cuModuleUnload(module);
        }
    }

    size_t class_of(const tier_layer & layer) const {
        for (size_t c = 0; c < classes.size(); c++) {
            if (owner.classes[c].get() == layer.of) {
                return c;
            }
        }
        throw tier_error{"block " + std::to_string(layer.block) + " is not placed"};
    }
    cuda_tables & state_of(const tier_layer & layer) { return classes[class_of(layer)]; }

    // ---- one step

    void check_fault() {
        const std::string text = torn ? "the GPU refused a copy after its slot had changed hands: load the model again" : take_fault();
        if (!text.empty()) {
            throw tier_error{text};
        }
    }

    ggml_status replay(ggml_backend_t inner, CUgraphExec exec) {
        after_inner(inner, flow->decide, flow->inner_done);
        gpu.check(gpu.cu.cuGraphLaunch(exec, flow->decide), "cuGraphLaunch");
        after_stream(inner, flow->decide, flow->decided);
        mirrored = false;
        end_step(true);
        return GGML_STATUS_SUCCESS;
    }

    // Counts the step after it, while the wrapped backend goes on with its result. A failed one is forgotten.
    void end_step(bool succeeded) {
        if (!succeeded) {
            // Layers may still be on their way to a scratch layer that the next step fills.
            gpu.cu.cuStreamSynchronize(flow->copies);
            gpu.cu.cuStreamSynchronize(flow->gathers);
            flow->early.synchronize();
            torn = torn || flow->early.torn;
        }
        for (cuda_tables & state : classes) {
            if (!succeeded) {
                gpu.cu.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(state.tables.heads), 0, state.tables.n_layers * sizeof(device_head), flow->decide);
            }
            void * arguments[] = {&state.tables};
            if (state.tables.weights != nullptr && owner.early.learning && succeeded) {
                launch(learn, state.tables.n_layers, 1, 0, flow->decide, arguments);
            }
            launch(tally, state.tables.n_layers, 1, state.tally_bytes, flow->decide, arguments);
        }
    }

    // What is submitted to `stream` from now on comes after what `inner` has to do.
    static void after_inner(ggml_backend_t inner, const stream & stream, event & event) {
        ggml_backend_event_record(&event.wrapped, inner);
        stream.wait(event.raw());
    }

    static void after_stream(ggml_backend_t inner, const stream & stream, event & event) {
        event.record(stream);
        ggml_backend_event_wait(inner, &event.wrapped);
    }

    bool capture(ggml_backend_t inner, ggml_cgraph * graph, const std::vector<expert_call> & calls, cuda_graphs::entry & entry) {
        ggml_backend_synchronize(inner);
        flow->decide.synchronize();
        if (gpu.cu.cuStreamBeginCapture(flow->decide, CU_STREAM_CAPTURE_MODE_RELAXED) != CUDA_SUCCESS) {
            return false;
        }
        ggml_status status = GGML_STATUS_FAILED;
        tier_error error;
        try {
            after_stream(inner, flow->decide, flow->decided);
            status = run(inner, graph, calls);
            after_inner(inner, flow->decide, flow->inner_done);
        } catch (const tier_error & failed) {
            error = failed;
        }
        CUgraph captured = nullptr;
        const CUresult ended = gpu.cu.cuStreamEndCapture(flow->decide, &captured);
        if (!error.text.empty() || status != GGML_STATUS_SUCCESS || ended != CUDA_SUCCESS) {
            ggml_log_internal(GGML_LOG_LEVEL_WARN, "spark: a token cannot be captured as one CUDA graph: %s\n", error.text.c_str());
            if (captured != nullptr) {
                gpu.cu.cuGraphDestroy(captured);
            }
            return false;
        }
        return graphs->take(entry, captured);
    }

    ggml_status run_part(ggml_backend_t inner, ggml_cgraph * graph, int from, int to) {
        if (from == to) {
            return GGML_STATUS_SUCCESS;
        }
        ggml_cgraph part = ggml_graph_view(graph, from, to);
        // The CUDA backend makes a graph of its own from a part that comes twice, which cannot be done inside another
        // capture. A part whose first tensor has changed never looks the same twice; nothing reads these bytes.
        touch++;
        std::memcpy(part.nodes[0]->padding, &touch, sizeof part.nodes[0]->padding);
        return ggml_backend_graph_compute_async(inner, &part);
    }

    ggml_status run(ggml_backend_t inner, ggml_cgraph * graph, const std::vector<expert_call> & calls) {
        const std::vector<const expert_call *> ahead = fetched_ahead(calls);
        if (!ahead.empty()) {
            mirror(inner);
            after_inner(inner, flow->copies, flow->inner_done);
            flow->gathers.wait(flow->inner_done.raw());
            bring(ahead, 0);
            bring(ahead, 1);
        }
        patches patches;
        size_t n_ahead = 0;
        int done = 0;
        flow->early.begin(classes.size());
        for (const expert_call & call : calls) {
            ggml_status status = run_part(inner, graph, done, call.first);
            if (status != GGML_STATUS_SUCCESS) {
                return status;
            }
            done = call.first;
            const bool here = n_ahead < ahead.size() && ahead[n_ahead] == &call;
            const size_t scratch = n_ahead % 2;
            after_inner(inner, flow->decide, flow->inner_done);
            flow->early.await(class_of(*call.layer), flow->decide, way_of(call) == way::slots ? call.layer : nullptr);
            decide_call(patches, graph, call, here ? int(scratch) : -1);
            after_stream(inner, flow->decide, flow->decided);
            flow->early.fetch(choose, copy, class_of(*call.layer), state_of(*call.layer), call, host, owner.host, flow->decide);
            if (!here) {
                continue;
            }
            ggml_backend_event_wait(inner, &flow->copied[scratch].wrapped);
            ggml_backend_event_wait(inner, &flow->gathered[scratch].wrapped);
            if (++n_ahead == ahead.size()) {
                continue;
            }
            // Where the experts have been read, the layer after next may come. No kernel that is fused across this
            // place takes so many tokens.
            done = call.last + 1;
            status = run_part(inner, graph, call.first, done);
            if (status != GGML_STATUS_SUCCESS) {
                return status;
            }
            after_inner(inner, flow->copies, flow->used[scratch]);
            flow->gathers.wait(flow->used[scratch].raw());
            bring(ahead, n_ahead + 1);
        }
        flow->early.await_all(flow->decide);  // of layers that this graph does not compute
        return run_part(inner, graph, done, graph->n_nodes);
    }

    ggml_status run_and_count(ggml_backend_t inner, ggml_cgraph * graph, const std::vector<expert_call> & calls) {
        try {
            const ggml_status status = run(inner, graph, calls);
            end_step(status == GGML_STATUS_SUCCESS);
            return status;
        } catch (const tier_error &) {
            end_step(false);
            throw;
        }
    }

    // Sends one call's experts to where they will be multiplied, and its nodes to them.
    void decide_call(patches & patches, ggml_cgraph * graph, const expert_call & call, int scratch) {
        tier_layer & layer = *call.layer;
        cuda_tables & state = state_of(layer);
        device_call arguments = call_arguments(state, call);
        void * both[] = {&state.tables, &arguments};
        const uint32_t n = call.n_used() * call.n_tokens();
        const uint32_t mark_blocks = (n + SPARK_BLOCK_THREADS - 1) / SPARK_BLOCK_THREADS;
        if (way_of(call) == way::slots) {
            shape(*layer.slot_ids, call);
            launch(ensure, DECIDING_BLOCKS + FETCH_BLOCKS, 1, 0, flow->decide, both);
            redirect(patches, graph, call, where::slots, layer.slot_ids);
            mirrored = false;
            return;
        }
        ggml_tensor & ids = state.seen_tensors[layer.index];
        shape(ids, call);
        const bool whole = way_of(call) == way::whole;
        if (whole) {
            arguments.mask = nullptr;  // nothing can be missing
        }
        launch(mark, mark_blocks, 1, 0, flow->decide, both);
        if (!whole && scratch < 0) {
            scratch_layers.clear(layer, 0, flow->decide, true);
            launch(gather, layer.n_experts, GATHER_ROWS, 0, flow->decide, both);
        }
        if (!whole) {
            gpu.check(gpu.cu.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(arguments.mask), 0, layer.n_experts * sizeof(uint32_t), flow->decide), "cuMemsetD8Async");
        }
        redirect(patches, graph, call, whole ? where::whole : scratch == 1 ? where::scratch1 : where::scratch0, &ids);
    }

    device_call call_arguments(cuda_tables & state, const expert_call & call) {
        const tier_layer & layer = *call.layer;
        device_call arguments = state.arguments(layer, 0, host, owner.host);
        arguments.ids = static_cast<const int32_t *>(call.ids->data);
        arguments.n_used = call.n_used();
        arguments.n_tokens = call.n_tokens();
        arguments.row = uint32_t(call.ids->nb[1] / sizeof(int32_t));
        return arguments;
    }

    static void shape(ggml_tensor & ids, const expert_call & call) {
        ids.ne[0] = call.n_used();
        ids.ne[1] = call.n_tokens();
        ids.nb[1] = size_t(ids.ne[0]) * sizeof(int32_t);
        ids.nb[2] = ids.nb[3] = ids.nb[1] * size_t(ids.ne[1]);
    }

    void launch(CUfunction function, uint32_t x, uint32_t y, uint32_t shared, CUstream stream, void ** arguments) {
        gpu.check(gpu.cu.cuLaunchKernel(function, x, y, 1, SPARK_BLOCK_THREADS, 1, 1, shared, stream, arguments, nullptr), "cuLaunchKernel");
    }

    // The host's slot_of becomes the device's. Waits for it, unless nothing has moved since the last time.
    void mirror(ggml_backend_t inner) {
        if (mirrored) {
            return;
        }
        after_inner(inner, flow->decide, flow->inner_done);
        for (size_t c = 0; c < classes.size(); c++) {
            slot_pool & pool = owner.classes[c]->pool;
            gpu.check(gpu.cu.cuMemcpyDtoHAsync(pool.slot_of.data(), reinterpret_cast<CUdeviceptr>(classes[c].tables.slot_of),
                                               pool.slot_of.size() * sizeof(int32_t), flow->decide),
                      "cuMemcpyDtoHAsync");
        }
        flow->decide.synchronize();
        mirrored = true;
    }

    void bring(const std::vector<const expert_call *> & ahead, size_t index) {
        if (index >= ahead.size()) {
            return;
        }
        tier_layer & layer = *ahead[index]->layer;
        cuda_tables & state = state_of(layer);
        const int scratch = int(index % 2);
        scratch_layers.clear(layer, scratch, flow->copies, false);
        scratch_layers.copy_missing(layer, scratch, flow->copies);
        flow->copied[scratch].record(flow->copies);
        device_call arguments = state.arguments(layer, scratch, host, owner.host);
        arguments.mask = nullptr;
        void * both[] = {&state.tables, &arguments};
        launch(gather, layer.n_experts, GATHER_ROWS, 0, flow->gathers, both);
        flow->gathered[scratch].record(flow->gathers);
    }
};

}  // namespace

std::unique_ptr<engine> make_cuda_engine(tier & tier, std::string & reason) {
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(tier.inner, &props);
    const cuda_driver * driver;
    CUdevice device;
    cuda_version found;
    if (props.type == GGML_BACKEND_DEVICE_TYPE_CPU || !find_device(tier.inner, driver, device, found, reason)) {
        return nullptr;
    }
    const std::string kernels = read_kernels(tier, reason);
    if (kernels.empty()) {
        return nullptr;
    }
    reason = beyond_limits(tier);
    if (!reason.empty()) {
        return nullptr;
    }
    try {
        return std::make_unique<cuda_engine>(tier, *driver, device, found.capability, kernels);
    } catch (const tier_error & error) {
        reason = error.text;
        return nullptr;
    }
}

}  // namespace spark
