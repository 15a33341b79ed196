"""What of options, flags and variables is left out of the key, and why. Whatever is not listed here is kept.

Dropping something that changes code gives wrong hits, keeping something that does not costs a miss: so a name is
listed only where it says where to write, how much to print, or how the process starts. docs/key.md shows the tables;
a test holds the page against them. Every change here is a change of TABLE_VERSION.
"""

from __future__ import annotations

from typing import Final

TABLE_VERSION: Final = "1"
"""A component of every key: two releases that drop different things never share one."""

_WHERE: Final = "where a dump or report is written"
_WHAT: Final = "what is dumped"
_PRINT: Final = "how much is printed"
_CACHE: Final = "where a cache of the compiler lies; its content is keyed by the compiler"

DROPPED_FLAGS: Final[dict[str, str]] = {
    "xla_detailed_logging": _PRINT,
    "xla_dump_buffer_assignment_analysis": _WHAT,
    "xla_dump_compact_gte": _WHAT,
    "xla_dump_compress_protos": _WHAT,
    "xla_dump_disable_metadata": _WHAT,
    "xla_dump_emitter_re": _WHAT,
    "xla_dump_enable_mlir_pretty_form": _WHAT,
    "xla_dump_full_hlo_config": _WHAT,
    "xla_dump_fusion_visualization": _WHAT,
    "xla_dump_hlo_as_dot": _WHAT,
    "xla_dump_hlo_as_html": _WHAT,
    "xla_dump_hlo_as_long_text": _WHAT,
    "xla_dump_hlo_as_proto": _WHAT,
    "xla_dump_hlo_as_riegeli": _WHAT,
    "xla_dump_hlo_as_text": _WHAT,
    "xla_dump_hlo_as_url": _WHAT,
    "xla_dump_hlo_module_re": _WHAT,
    "xla_dump_hlo_pass_re": _WHAT,
    "xla_dump_hlo_pipeline_re": _WHAT,
    "xla_dump_hlo_to_subfolder": _WHERE,
    "xla_dump_include_timestamp": _WHAT,
    "xla_dump_large_constants": _WHAT,
    "xla_dump_latency_hiding_schedule": _WHAT,
    "xla_dump_max_hlo_modules": _WHAT,
    "xla_dump_module_metadata": _WHAT,
    "xla_dump_to": _WHERE,
    "xla_enable_dumping": _WHAT,
    "xla_enable_scoped_logging_timers": _PRINT,
    "xla_gpu_dump_autotune_logs_to": _WHERE,
    "xla_gpu_dump_autotune_results_to": _WHERE,
    "xla_gpu_dump_autotuned_gemm_fusions": _WHAT,
    "xla_gpu_dump_autotuned_instructions": _WHAT,
    "xla_gpu_dump_cost_model_top_k_candidates_to": _WHERE,
    "xla_gpu_dump_llvmir": _WHAT,
    "xla_gpu_experimental_autotuner_cache_dir": _CACHE,
    "xla_gpu_experimental_dump_fdo_profiles": _WHAT,
    "xla_gpu_experimental_dump_gpu_executable": _WHAT,
    "xla_gpu_kernel_cache_file": _CACHE,
    "xla_gpu_per_fusion_autotune_cache_dir": _CACHE,
    "xla_gpu_print_compilation_stats": _PRINT,
    "xla_hlo_graph_addresses": _WHAT,
    "xla_hlo_graph_sharding_color": _WHAT,
    # absl's logging flags, which libtpu takes beside its own
    "alsologtostderr": _PRINT,
    "log_dir": _WHERE,
    "logtostderr": _PRINT,
    "minloglevel": _PRINT,
    "stderrthreshold": _PRINT,
    "tpu_log_dir": _WHERE,
    "v": _PRINT,
    "vmodule": _PRINT,
}
"""By flag name: on XLA_FLAGS, LIBTPU_INIT_ARGS and the command line, in DebugOptions, and in both option maps.

Snapshot dumps (`xla_dump_hlo_snapshots`) and `xla_gpu_log_minmax` are kept: they go on in the executable.
"""

FILE_FLAGS: Final = frozenset(
    {
        "xla_candidate_configs_file",
        "xla_gpu_algorithm_denylist_path",
        "xla_gpu_experimental_collective_perf_table_path",
        "xla_gpu_experimental_matmul_perf_table_path",
        "xla_gpu_gemm_autotuner_override_file",
        "xla_gpu_load_autotune_results_from",
        "xla_gpu_pgle_profile_file_or_directory_path",
        "xla_gpu_target_config_filename",
        "xla_gpu_topology_filename",
    }
)
"""Flags that are known to name an input: its content stands in the key instead of its path. An unknown flag whose value
happens to name a file is kept by value and content."""

ORDERED_FLAGS: Final = frozenset(
    {
        "xla_cpu_enable_concurrency_optimized_scheduler",
        "xla_cpu_opt_preset",
        "xla_flags_reset",
        "xla_gpu_enable_libnvjitlink",
        "xla_gpu_graph_enable_concurrent_region",
        "xla_gpu_graph_level",
    }
)
"""Flags that set or reset others while they are read: beside one of them the order of all flags is kept.

Found by giving jaxlib 0.10.2 each of its flags alone and looking for changes in other fields; a test does so again.
"""

KEPT_PREFIXES: Final = ("XLA_", "LIBTPU_", "TPU_", "PJRT_")
"""Variables with these prefixes, and KEPT_VARIABLES, are in the key unless dropped; others are not looked at."""

KEPT_VARIABLES: Final = frozenset({"TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS"})

_PLACE: Final = "which devices or process this is"
_NAME: Final = "a name, address or port"
_START: Final = "how the library starts"
_MEMORY: Final = "memory of the running job, not of the code"
_LIBRARY: Final = "the compiler's identity says what was loaded"
_TOPOLOGY: Final = "the target says it, from the topology description"

DROPPED_VARIABLES: Final[dict[str, str]] = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": _START,
    "LIBTPU_LOCKFILE": _START,
    "PJRT_LIBRARY_PATH": _LIBRARY,
    "PJRT_NAMES_AND_LIBRARY_PATHS": _LIBRARY,
    "PJRT_PLUGIN": _LIBRARY,
    "TPU_ACCELERATOR_TYPE": _TOPOLOGY,
    "TPU_HOSTNAME_OVERRIDE": _NAME,
    "TPU_LIBRARY_PATH": _LIBRARY,
    "TPU_LOAD_LIBRARY": _START,
    "TPU_LOCKFILE": _START,
    "TPU_LOG_DIR": _WHERE,
    "TPU_MESH_CONTROLLER_ADDRESS": _NAME,
    "TPU_MESH_CONTROLLER_PORT": _NAME,
    "TPU_MIN_LOG_LEVEL": _PRINT,
    "TPU_ML_PLATFORM": "who asks, not what for",
    "TPU_ML_PLATFORM_VERSION": "who asks, not what for",
    "TPU_NAME": _NAME,
    "TPU_PROCESS_ADDRESSES": _NAME,
    "TPU_PROCESS_PORT": _NAME,
    "TPU_RUNTIME_METRICS_PORTS": _NAME,
    "TPU_SKIP_MDS_QUERY": _START,
    "TPU_STDERR_LOG_LEVEL": _PRINT,
    "TPU_TOPOLOGY": _TOPOLOGY,
    "TPU_VISIBLE_CHIPS": _PLACE,
    "TPU_VISIBLE_DEVICES": _PLACE,
    "TPU_VMODULE": _PRINT,
    "TPU_WORKER_HOSTNAMES": _NAME,
    "TPU_WORKER_ID": _PLACE,
    "XLA_CLIENT_MEM_FRACTION": _MEMORY,
    "XLA_COMPILATION_CACHE_SIZE": _CACHE,
    "XLA_METRICS_FILE": _WHERE,
    "XLA_PERSISTENT_CACHE_PATH": _CACHE,
    "XLA_PERSISTENT_CACHE_READ_ONLY": _CACHE,
    "XLA_PYTHON_CLIENT_ALLOCATOR": _MEMORY,
    "XLA_PYTHON_CLIENT_MEM_FRACTION": _MEMORY,
    "XLA_PYTHON_CLIENT_PREALLOCATE": _MEMORY,
}

DROPPED_PLUGIN_OPTIONS: Final[dict[str, str]] = {
    "memory_fraction": _MEMORY,
    "ml_framework_name": "who asks, not what for",
    "ml_framework_version": "who asks, not what for",
    "preallocate": _MEMORY,
}
