// The element types of tensors that are passed on as pointers.
#pragma once

namespace pagebinder {

enum class Element { F32, BF16, F16 };

}  // namespace pagebinder
