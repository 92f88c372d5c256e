// pybind11 module `_host`: facts about the build and checks of draft trees that live on the host. No torch in here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "params.h"

namespace py = pybind11;

#ifndef TREEWY_VERSION
#error "the build passes TREEWY_VERSION, TREEWY_GIT_COMMIT, TREEWY_TORCH_VERSION, TREEWY_COMPILER, TREEWY_ARCHITECTURES"
#endif

namespace {

py::dict build_info() {
  py::dict d;
  d["version"] = TREEWY_VERSION;
  d["git_commit"] = TREEWY_GIT_COMMIT;
  d["torch_version"] = TREEWY_TORCH_VERSION;
  d["compiler"] = TREEWY_COMPILER;
#ifdef TREEWY_WITH_CUDA
  d["cuda"] = true;
#else
  d["cuda"] = false;
#endif
  d["cuda_compiler"] = TREEWY_CUDA_COMPILER;
  py::list archs;
  std::string list = TREEWY_ARCHITECTURES, item;
  for (size_t i = 0, j; i < list.size(); i = j + 1) {
    j = std::min(list.find(';', i), list.size());
    archs.append(list.substr(i, j - i));
  }
  d["architectures"] = archs;
  d["max_nodes"] = treewy::kMaxNodes;
  d["max_conv_width"] = treewy::kMaxConvWidth;
  return d;
}

[[noreturn]] void refuse(const std::string& what) { throw py::value_error("treewy: " + what); }

void check_size(const char* name, size_t size) {
  if (size < 1 || size > static_cast<size_t>(treewy::kMaxNodes))
    refuse(std::string("argument '") + name + "': a tree of " + std::to_string(size) + " nodes; allowed: 1 to " +
           std::to_string(treewy::kMaxNodes));
}

std::vector<int64_t> check_parents(const std::vector<int64_t>& parents) {
  check_size("parents", parents.size());
  for (size_t t = 0; t < parents.size(); ++t)
    if (parents[t] < -1 || parents[t] >= static_cast<int64_t>(t))
      refuse("argument 'parents': parents[" + std::to_string(t) + "] is " + std::to_string(parents[t]) + "; allowed: " +
             (t == 0 ? std::string("-1 (the root)") : "-1 to " + std::to_string(t - 1)));
  return parents;
}

std::vector<int64_t> parents_from_links(const std::vector<int64_t>& next_token, const std::vector<int64_t>& next_sibling) {
  check_size("next_token", next_token.size());
  const int64_t T = static_cast<int64_t>(next_token.size());
  if (next_sibling.size() != next_token.size())
    refuse("argument 'next_sibling': " + std::to_string(next_sibling.size()) + " entries; allowed: " + std::to_string(T) +
           ", as many as 'next_token'");
  const auto found = [](const char* name, int64_t t, int64_t to) {
    return std::string("argument '") + name + "': " + name + "[" + std::to_string(t) + "] is " + std::to_string(to);
  };
  for (int64_t t = 0; t < T; ++t)
    for (const char* name : {"next_token", "next_sibling"}) {
      const int64_t to = (name[5] == 't' ? next_token : next_sibling)[t];
      if (to < -1 || to >= T) refuse(found(name, t, to) + "; allowed: -1 (none) to " + std::to_string(T - 1));
    }
  std::vector<int64_t> parents(T, -1);
  for (int64_t t = 0; t < T; ++t) {
    const char* name = "next_token";
    int64_t from = t;
    for (int64_t c = next_token[t]; c != -1; from = c, c = next_sibling[c], name = "next_sibling") {
      if (c <= t) refuse(found(name, from, c) + ", a child of node " + std::to_string(t) + "; allowed: more than its parent");
      if (parents[c] >= 0)
        refuse(found(name, from, c) + ", a node that is a child of node " + std::to_string(parents[c]) +
               " already; allowed: one link to a node");
      parents[c] = t;
    }
  }
  return parents;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Build facts and host-side tree checks of treewy_sglang.";
  m.def("build_info", &build_info, "Version, git commit, torch version, compiler, cuda yes/no, architectures, limits.");
  m.def("check_parents", &check_parents, py::arg("parents"),
        "Return the list if it is a tree or forest in topological order (parents[0] = -1, -1 <= parents[t] < t), else "
        "raise ValueError naming entry, value and allowed values.");
  m.def("parents_from_links", &parents_from_links, py::arg("next_token"), py::arg("next_sibling"),
        "Parents from first-child / next-sibling links (-1: none), or ValueError naming the bad link.");
}
