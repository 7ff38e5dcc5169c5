// Activations by the names that ops have for them.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>
#include <utility>

#include "activation.h"
#include "checks.h"

namespace pagebinder {

inline Activation activation_named(const std::string& name) {
  constexpr std::pair<const char*, Activation> NAMES[] = {
      {"silu", Activation::SILU}, {"gelu", Activation::GELU},   {"gelu_tanh", Activation::GELU_TANH},
      {"relu", Activation::RELU}, {"relu2", Activation::RELU2}, {"sigmoid", Activation::SIGMOID}};
  for (const auto& [known, activation] : NAMES)
    if (name == known) return activation;
  PB_CHECK(false, "unknown activation \"", name, "\"");
  return Activation::NONE;
}

}  // namespace pagebinder
