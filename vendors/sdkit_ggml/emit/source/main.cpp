// Computes the component once, or many times to measure it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "component.h"

namespace {

struct Options {
    std::string weights;
    std::string in;
    std::string out;
    std::string device;
    std::string backends;
    std::string variant;
    int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    int bench = 0;
    bool is_list = false;
};

void print_usage(const char * program) {
    std::printf(
        "%s: computes %s\n\n"
        "  %s weights.gguf --in DIR --out DIR\n\n"
        "  --in DIR        read each input from a .npy file (or .bin, the numbers alone) named\n"
        "                  as below; zeros without --in\n"
        "  --out DIR       write each output to a .npy file; the folder must be there\n"
        "  --bench N       compute N times more and print how long it took\n"
        "  --device NAME   compute there (see --list); else the GPU that cmake chose, or the CPU\n"
        "  --threads N     of the CPU\n"
        "  --backends DIR  load more backends of ggml from there\n"
        "  --variant NAME  which of the graphs; else the first that the device supports\n"
        "  --list          print the devices and the graphs\n",
        program, component_name, program);
    for (const auto * specs : {&inputs, &outputs}) {
        std::printf("\n%s:\n", specs == &inputs ? "inputs" : "outputs");
        for (const TensorSpec & spec : *specs) {
            std::printf("  %-24s", spec.file);
            for (int64_t size : spec.shape) {
                std::printf(" %lld", static_cast<long long>(size));
            }
            std::printf("\n");
        }
    }
}

int number(const std::string & option, const char * text, int least) {
    char * end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*text == 0 || *end != 0 || value < least || value > 1000000) {
        throw Failure(option + " is \"" + text + "\"; it may be a number from " + std::to_string(least));
    }
    return static_cast<int>(value);
}

Options options_of(int argc, char ** argv) {
    Options found;
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        if (word == "--list") {
            found.is_list = true;
        } else if (word.compare(0, 2, "--") != 0 && found.weights.empty()) {
            found.weights = word;
        } else if (i + 1 == argc) {
            throw Failure(word + " is no option, or lacks its value; see --help");
        } else if (word == "--in") {
            found.in = argv[++i];
        } else if (word == "--out") {
            found.out = argv[++i];
        } else if (word == "--device") {
            found.device = argv[++i];
        } else if (word == "--backends") {
            found.backends = argv[++i];
        } else if (word == "--variant") {
            found.variant = argv[++i];
        } else if (word == "--threads") {
            found.threads = number(word, argv[++i], 1);
        } else if (word == "--bench") {
            found.bench = number(word, argv[++i], 1);
        } else {
            throw Failure(word + " is no option; see --help");
        }
    }
    return found;
}

void set_variable(const char * name, const char * value) {
    if (!std::getenv(name)) {
#ifdef _WIN32
        _putenv_s(name, value);
#else
        setenv(name, value, 1);
#endif
    }
}

ggml_backend_dev_t device_of(const std::string & name) {
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        const bool is_cpu = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
#ifdef PREFERS_GPU
        const bool is_default = !is_cpu;
#else
        const bool is_default = is_cpu;
#endif
        if (name.empty() ? is_default : name == ggml_backend_dev_name(device)) {
            return device;
        }
    }
    throw Failure(name.empty() ? "this ggml sees no GPU; see --list" : "there is no device " + name + "; see --list");
}

void set_threads(ggml_backend_dev_t device, ggml_backend_t backend, int threads) {
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"));
    if (set) {
        set(backend, threads);
    }
}

// A variant of the graph on the device, with what goes in and comes out.
struct Loaded {
    std::unique_ptr<Graph> graph;
    Inputs in;
    Outputs out;
};

// Builds the variant of that name, or the first that the device supports.
Loaded load(ggml_backend_dev_t device, const Weights & weights, const std::string & name) {
    const bool is_cpu = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
    std::string refusals;
    for (const Variant & variant : variants) {
        if (name.empty() ? variant.is_for_cpu == is_cpu : name == variant.name) {
            Loaded loaded;
            loaded.graph.reset(new Graph(device, variant.arena_bytes, variant.tensor_count));
            loaded.in = variant.make_inputs(*loaded.graph);
            loaded.out = variant.build_graph(*loaded.graph, weights, loaded.in);
            const std::vector<std::string> refused = loaded.graph->refused(device);
            if (refused.empty()) {
                std::fprintf(stderr, "%s on %s (%s), %s\n", component_name, ggml_backend_dev_name(device),
                             ggml_backend_dev_description(device), variant.name);
                return loaded;
            }
            for (const std::string & operation : refused) {
                refusals += " " + operation;
            }
        }
    }
    if (refusals.empty()) {
        throw Failure("there is no variant \"" + name + "\"; see --list");
    }
    throw Failure(std::string(ggml_backend_dev_name(device)) + " lacks operations:" + refusals);
}

void compute(ggml_backend_t backend, const Graph & graph) {
    const ggml_status status = ggml_backend_graph_compute(backend, graph.steps());
    ggml_backend_synchronize(backend);
    if (status != GGML_STATUS_SUCCESS) {
        throw Failure(std::string("the device failed: ") + ggml_status_to_string(status));
    }
}

void run(const Options & options) {
    if (is_exact) {  // ggml looks at these as it opens a device
        set_variable("GGML_VK_DISABLE_F16", "1");
        set_variable("NVIDIA_TF32_OVERRIDE", "0");
    }
    ggml_backend_load_all();
    if (!options.backends.empty()) {
        ggml_backend_load_all_from_path(options.backends.c_str());
    }
    if (options.is_list) {
        for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
            ggml_backend_dev_t device = ggml_backend_dev_get(i);
            std::printf("device   %-12s %s\n", ggml_backend_dev_name(device), ggml_backend_dev_description(device));
        }
        for (const Variant & variant : variants) {
            std::printf("variant  %s\n", variant.name);
        }
        return;
    }
    if (options.weights.empty()) {
        throw Failure("give the weights, a .gguf file; see --help");
    }
    ggml_backend_dev_t device = device_of(options.device);
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        throw Failure(std::string(ggml_backend_dev_name(device)) + " does not open");
    }
    set_threads(device, backend.get(), options.threads);

    const WeightsFile file(options.weights, weights_layout, device);
    const Weights weights = find_weights(file);
    const Loaded loaded = load(device, weights, options.variant);

    Arrays given;
    for (const TensorSpec & spec : inputs) {
        given[spec.file] = options.in.empty() ? zeros(spec) : read_array(options.in, spec);
    }
    Arrays results = set_inputs(loaded.in, given);
    compute(backend.get(), *loaded.graph);
    get_outputs(loaded.out, results);
    if (!options.out.empty()) {
        for (const TensorSpec & spec : outputs) {
            write_array(options.out, spec, results.at(spec.file));
        }
    }
    if (options.bench) {
        std::vector<double> times_ms;
        for (int i = 0; i < options.bench; i++) {
            // A result may lie where an input was.
            set_inputs(loaded.in, given);
            const auto start = std::chrono::steady_clock::now();
            compute(backend.get(), *loaded.graph);
            const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
            times_ms.push_back(taken.count());
        }
        std::sort(times_ms.begin(), times_ms.end());
        std::printf("%d runs: %.3f ms at best, %.3f ms in the middle\n", options.bench, times_ms.front(),
                    times_ms[times_ms.size() / 2]);
    }
}

}  // namespace

int main(int argc, char ** argv) {
    try {
        for (int i = 1; i < argc; i++) {
            if (!std::strcmp(argv[i], "--help") || !std::strcmp(argv[i], "-h")) {
                print_usage(argv[0]);
                return 0;
            }
        }
        run(options_of(argc, argv));
        return 0;
    } catch (const std::exception & error) {
        std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
        return 1;
    }
}
