// Activations of gated layers.
#pragma once

namespace pagebinder {

enum class Activation { NONE, SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID };

}  // namespace pagebinder
