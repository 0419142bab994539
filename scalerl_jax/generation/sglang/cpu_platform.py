"""A platform of SGLang on which text models run without an accelerator.

SGLang's own CPU platform wants kernels that are not published. This one takes
what PyTorch has: slow, and for tests and small models only. It is an entry
point of the group `sglang.srt.platforms`, so it runs in the environment of the
server, which has no JAX.
"""

import os
from typing import Any

NAME = 'scalerl_cpu'
VARIABLE = 'SGLANG_PLATFORM'


def activate() -> str | None:
  """Tells SGLang which platform to use.

  Returns:
    The path of the class where the environment asks for it by name, else None:
    a machine with accelerators has this package too.
  """
  if os.environ.get(VARIABLE) == NAME:
    return f'{__name__}:CpuPlatform'
  return None


def __getattr__(name: str) -> Any:
  # Made when SGLang asks for it, so that the module imports without SGLang.
  if name != 'CpuPlatform':
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  from sglang.srt.platforms import cpu
  from sglang.srt.platforms import device_mixin
  from sglang.srt.platforms import interface

  class CpuPlatform(cpu.CpuDeviceMixin, interface.SRTPlatform):
    """Kernels of PyTorch; nothing that a device would have."""

    # Not CPU: that is what asks for the kernels of SGLang's own platform.
    _enum = device_mixin.PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
      """Names the attention of PyTorch."""
      return 'torch_native'

    def init_backend(self) -> None:
      """Takes faster kernels, and plain memory to record experts in."""
      from sglang.srt.mem_cache.pool_host import common

      from scalerl_jax.generation.sglang import cpu_kernels

      cpu_kernels.install()

      def allocate(
        dims: Any, *, dtype: Any, device: str, allocator: Any, **_: Any
      ) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

      # SGLang's own registers the memory with a driver that is not there.
      common.ALLOC_MEMORY_FUNCS['cpu'] = allocate

  return CpuPlatform
