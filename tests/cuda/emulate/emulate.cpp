#include "cuda_runtime.h"
asm(R"(
.text
.globl emu_switch
emu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
namespace treewy { namespace cuda { alignas(1024) unsigned char shared[emu::kSharedBytes]; } }
unsigned char* emu::shared_memory = treewy::cuda::shared;
