#include "shoal/ddp.h"

#include "engine/wrapper/join_access.h"
#include "wrappers/bind.h"

namespace shoal::python {
namespace {

DistributedDataParallelOptions ddp_options(const py::dict& given) {
  DistributedDataParallelOptions options;
  Keywords(given, "DistributedDataParallel")
      .read("broadcast_buffers", options.broadcast_buffers)
      .read("find_unused_parameters", options.find_unused_parameters)
      .read("static_graph", options.static_graph)
      .read("grad_reduce_in_fp32", options.grad_reduce_in_fp32)
      .read("ignored", options.ignored)
      .read("reduce_dtype", options.reduce_dtype)
      .with("communication_hook", [&](const py::object& hook) { options.communication_hook = hook_of(hook); })
      .read("bucket_cap_mb", options.bucket_cap_mb)
      .read("first_bucket_mb", options.first_bucket_mb)
      .read("gradient_as_bucket_view", options.gradient_as_bucket_view)
      .finish();
  return options;
}

}  // namespace

void bind_ddp(py::module_& module) {
  using Core = OpenCore<DistributedDataParallelCore>;
  py::class_<DataParallelCore, Held<DataParallelCore>>(module, "DataParallelCore");
  py::class_<Core, DataParallelCore, Held<Core>> ddp(module, "DistributedDataParallelCore");
  ddp.def(py::init([](const std::shared_ptr<Mirror>& mirror, const Group& group, const py::dict& given) {
    const auto options = ddp_options(given);
    return unlocked([&] { return Held<Core>(new Core(mirror, group, options)); });
  }));
  bind_parallel<Core>(ddp);
  ddp.def("settle", [](Core& core) { unlocked([&] { JoinAccess::settle(core); }); });
}

}  // namespace shoal::python
