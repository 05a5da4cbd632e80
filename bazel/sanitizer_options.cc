// The sanitizers' options, compiled into each program of --config=asan, ubsan
// and tsan: they are then the same in any folder, for `bazel run`, on remote
// workers and in processes that a test starts with an environment of its own.
// ASAN_OPTIONS and the like still win over them.

// The runtimes look these names up.
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" {

// Tests ask for more memory than there is.
const char* __asan_default_options() {
  return "detect_leaks=1:detect_stack_use_after_return=1:"
         "check_initialization_order=1:strict_init_order=1:"
         "allocator_may_return_null=1";
}

// Where a peer is lost, libtorch's process group of Gloo frees a collective's
// own buffer before Gloo's thread has let go of it: what that thread may still
// write to a socket, which nobody reads then, is freed memory.
const char* __asan_default_suppressions() {
  return "interceptor_via_fun:gloo::transport::tcp::Pair::write\n";
}

const char* __ubsan_default_options() { return "print_stacktrace=1"; }

// libtorch, libstdc++ and the like are not instrumented: what orders their
// threads is not all seen, so that what they do is not reported. It still is
// where they call into instrumented code.
const char* __tsan_default_options() {
  return "halt_on_error=1:second_deadlock_stack=1:"
         "ignore_noninstrumented_modules=1:allocator_may_return_null=1";
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier)
