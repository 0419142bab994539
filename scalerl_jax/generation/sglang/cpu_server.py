"""Starts a server on a machine without an accelerator.

    SGLANG_PLATFORM=scalerl_cpu python -m
        scalerl_jax.generation.sglang.cpu_server ARGUMENTS OF SGLANG

SGLang imports a few names of torchvision for models that read images, and no
published torchvision imports beside the CPU build of PyTorch. They are put in
place before SGLang is imported, in this process and, since `multiprocessing`
imports the main module again, in each that it starts.
"""

import runpy
import sys
import types


def stand_in() -> None:
  """Lets modules of SGLang that serve no text model import torchvision."""
  from transformers.utils import import_utils

  # It remembers the answer, no, and so does not use what follows.
  import_utils.is_torchvision_available()
  functional = types.ModuleType('torchvision.transforms.functional')
  transforms = types.ModuleType('torchvision.transforms')
  vision = types.ModuleType('torchvision')
  vars(functional).update(InterpolationMode=None)
  vars(transforms).update(InterpolationMode=None, functional=functional)
  vars(vision).update(transforms=transforms)
  for module in (functional, transforms, vision):
    sys.modules[module.__name__] = module


# As another module's neighbour it changes nothing.
if __name__ in ('__main__', '__mp_main__'):
  stand_in()
if __name__ == '__main__':
  # `alter_sys` would make SGLang's the main module that is imported again.
  runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=False)
