// Candidates that wait for a measurement. TREEWY_VARIANT, a sum of these numbers, chooses at run time; unset: 0.
#pragma once

#include <cstdlib>

namespace treewy {
namespace cuda {

enum Mode {
  kModeTf32 = 1,    // drafts of up to 32 nodes: S0 [k q] in tf32 products, state never in registers as a whole
  kModeWide = 2,    // block kernel: all eight warps prepare, as many as the batch needs solve
  kModeShare = 4,   // drafts of 33 to 64 nodes: rows staged once for the value heads of a key head
  kModeTiles = 8,   // the second tile of the last block of nodes is skipped where it is empty
  kModeLean = 16,   // fixed layout, parked cursors: fewer spills
  kModeCommit = 32, // commit with blocks of half the size
  kModePacked = 64, // set by the launcher
  kModePair = 128,  // the two value heads of a key head are prepared together
  kModeFixed = 256,
  kModeMany = 512,  // twelve consumers
  kModeAlone = 1024,  // never pairs
  kModeRich = 4096,  // eight producers
  kModeFew = 2048,  // eight consumers
};

inline int variant() {
  const char* x = std::getenv("TREEWY_VARIANT");
  return x != nullptr ? std::atoi(x) : 0;
}

}  // namespace cuda
}  // namespace treewy
