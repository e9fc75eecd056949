#pragma once
// Other memory for a storage that is in use.

#include <c10/core/Storage.h>

#include <cstddef>
#include <utility>

#include "memory/views.h"

namespace shoal {

// Gives the storage of `home`, which a parameter has too, the memory of `to`. Who else holds the storage may have the
// address of the former memory (as NumPy does), so that stays then.
inline void give_other_memory(const at::Tensor& home, const at::Tensor& to) {
  struct Memories {
    at::Tensor now;
    c10::DataPtr former;
  };
  constexpr size_t own_uses = 2;  // the home and the parameter
  auto* storage = home.storage().unsafeGetStorageImpl();
  const bool used_elsewhere = home.storage().use_count() > own_uses;
  auto former = storage->set_data_ptr(pointer_to(to));
  if (!used_elsewhere) return;
  storage->set_data_ptr_noswap({to.data_ptr(), new Memories{to, std::move(former)},
                                [](void* held) { delete static_cast<Memories*>(held); }, to.device()});
}

}  // namespace shoal
