"""What is compared: each configuration's name, what it needs, the bytes that it must move, and its peers.

Notable: nothing here imports torch; the parent process never does.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

WORLD = 2
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0
COMPUTE = "compute"

Kind = Literal["compute", "polyscale", "torch", "deepspeed"]


@dataclass(frozen=True)
class Configuration:
    """One way to train the model.

    Attributes:
        name: as the table and ``--configs`` know it.
        kind: whose code runs the step.
        stage: ZeRO stage; None for forward and backward alone.
        plugin: data-parallel plugin of polyscale.
        communication: collectives of polyscale; all others use gloo.
        shared: whether the ranks of this host share their parameters (``share_host_memory``).
        tuned: whether glibc keeps freed memory, as polyscale's cpu accelerator tells it to.
        release: DeepSpeed's stage 3: free parameters after forward however soon they are used again.
    """

    name: str
    kind: Kind
    stage: int | None = None
    plugin: str = ""
    communication: str = "gloo"
    shared: bool = False
    tuned: bool = False
    release: bool = False

    @property
    def torch_peer(self) -> str:
        """Torch's own of the same kind; "" for forward and backward alone."""
        return {None: "", 0: "torch-ddp", 3: "torch-fsdp2-3"}.get(self.stage, "torch-fsdp2-2")

    @property
    def deepspeed_peer(self) -> str:
        """DeepSpeed at the same stage; "" for forward and backward alone."""
        return "" if self.stage is None else f"deepspeed-{self.stage}"

    @property
    def why_not_simulated(self) -> str:
        """Say why it is not run on the simulated device; "" where it is."""
        if self.kind in ("compute", "deepspeed"):
            return f"{self.kind} does not run on the simulated device here"
        if self.communication != "gloo" or self.shared:
            return f"{self.communication} is for memory of the host"
        return ""

    def least_bytes(self, parameters: int, world: int = WORLD) -> float | None:
        """Bytes that each rank must send in a step, of ``parameters`` bytes; None where nothing is updated.

        A ring's all-reduce sends 2 (N-1)/N P per rank, its halves reduce-scatter and all-gather (N-1)/N P each
        (Rajbhandari et al. 2020, "ZeRO", section 7: stages 1 and 2 move what stage 0 does, stage 3 half as much again,
        because backward gathers once more). Shared parameters need no all-gather.
        """
        if self.stage is None:
            return None
        passes = 3 if self.stage == 3 else 1 if self.shared else 2
        return passes * (world - 1) / world * parameters

    def engine_config(self, micro: int, accelerator: str) -> dict[str, Any]:
        """The configuration that polyscale is given."""
        backends: dict[str, Any] = {"accelerator": accelerator, "data_parallel": self.plugin}
        if accelerator == "cpu":
            backends["communication"] = self.communication
        if self.shared:
            backends["options"] = {"zero": {"share_host_memory": True}}
        return {
            "train_micro_batch_size_per_gpu": micro,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
            "zero_optimization": {"stage": self.stage},
            "gradient_clipping": CLIP,
            "backends": backends,
        }

    def deepspeed_config(self, micro: int) -> dict[str, Any]:
        """The configuration that DeepSpeed is given: its defaults, with the optimizer it is handed."""
        zero: dict[str, Any] = {"stage": self.stage}
        if self.release:
            zero |= {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
        return {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }


def _all() -> tuple[Configuration, ...]:
    found = [Configuration(COMPUTE, "compute"), Configuration("compute-tuned", "compute", tuned=True)]
    for stage in (1, 2, 3):
        for communication in ("gloo", "shm"):
            name = f"zero{stage}-{communication}"
            found.append(Configuration(name, "polyscale", stage, "zero", communication))
        if stage < 3:
            found.append(Configuration(f"zero{stage}-shared", "polyscale", stage, "zero", "shm", shared=True))
    found += [Configuration(f"fsdp2-{stage}", "polyscale", stage, "fsdp2") for stage in (2, 3)]
    found += [Configuration(f"ddp-{name}", "polyscale", 0, "ddp", name) for name in ("gloo", "shm")]
    found += [Configuration("torch-ddp", "torch", 0)]
    found += [Configuration(f"torch-fsdp2-{stage}", "torch", stage) for stage in (2, 3)]
    found += [Configuration(f"deepspeed-{stage}", "deepspeed", stage) for stage in range(4)]
    found += [Configuration("deepspeed-3-release", "deepspeed", 3, release=True)]
    return tuple(found)


CONFIGURATIONS = _all()


def choose(globs: list[str]) -> list[Configuration]:
    """Those whose name one of ``globs`` matches, and always ``compute``, which the others are compared with.

    Raises:
        ValueError: a glob matches nothing.
    """
    names = [configuration.name for configuration in CONFIGURATIONS]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ValueError(f"--configs {glob}: no configuration is called so. There are: {', '.join(names)}")
    wanted = [*(globs or ["*"]), COMPUTE]
    return [each for each in CONFIGURATIONS if any(fnmatchcase(each.name, glob) for glob in wanted)]


def why_skipped(configuration: Configuration, *, without_deepspeed: str) -> str:
    """Say which plugin or peer a configuration lacks here; "" where it can run.

    Args:
        configuration: any.
        without_deepspeed: why DeepSpeed cannot run; "" where it can.
    """
    if configuration.kind == "deepspeed":
        return without_deepspeed
    if configuration.kind != "polyscale":
        return ""
    from polyscale.discovery import installed

    for kind, name in (("parallelism", configuration.plugin), ("communication", configuration.communication)):
        if name not in {entry.name for entry in installed(kind)}:
            return f"no {kind} plugin {name!r} is installed"
    return ""
