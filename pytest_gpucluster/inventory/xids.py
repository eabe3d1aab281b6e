"""What NVIDIA's Xid codes mean and what to do about them, in our own words. Pure.

After NVIDIA's catalogue of Xids for Ampere and newer GPUs (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html)
and its list of Xid errors for r555; names are the driver's (``nverror.h``). Codes of graphics and video engines are not listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

CATALOGUE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
XidKind: TypeAlias = Literal["application", "hardware", "link", "driver", "test", "unknown"]
"""``application``: a program can cause it by itself. ``test``: a test message, no error."""

RESTART = "start the program again; if the code comes back with other programs too, run NVIDIA's field diagnostic"
CHECK = "look for the error in the program first (compute-sanitizer); if healthy programs get it too, suspect the GPU"
RESET = "end all processes on the GPU and reset it (nvidia-smi --gpu-reset); if the code comes back, contact the vendor"
REBOOT = "reboot the node; if the code comes back, check how the GPU sits and its power, then contact the vendor (RMA)"
VENDOR = "take the GPU out of service and contact the vendor"
WATCH = "nothing at once; watch the GPU, and contact the vendor if the code comes back"
LINK = "check the NVLinks and the fabric (nvidia-smi nvlink -s, Fabric Manager, the switches), then reset the GPU"
COOLING = "check the power cables, the power supply and the cooling of the GPU"
UPDATE = "bring driver and firmware to versions that fit each other"
ASKED = "do what nvidia-smi -q shows as GPU Recovery Action"
NOTHING = "nothing: a test message"


@dataclass(frozen=True, slots=True)
class Xid:
    """One code: the driver's name for it, what it says about the GPU, its kind, and what to do."""

    code: int
    name: str
    kind: XidKind
    meaning: str
    action: str

    def __str__(self) -> str:
        """``Xid 79 (ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS): the GPU has fallen off the PCIe bus``."""
        return f"Xid {self.code} ({self.name}): {self.meaning}"


_ROWS: tuple[tuple[int, str, XidKind, str, str], ...] = (
    (8, "ROBUST_CHANNEL_FIFO_ERROR_IDLE_TIMEOUT", "driver", "a channel of the GPU did not become idle in time", RESTART),
    (11, "ROBUST_CHANNEL_GR_ERROR_MISSING_HW", "application", "the stream of commands was invalid or corrupted", CHECK),
    (13, "ROBUST_CHANNEL_GR_EXCEPTION", "application", "a kernel raised an exception, often an address out of bounds", CHECK),
    (25, "ROBUST_CHANNEL_GR_ILLEGAL_NOTIFY", "application", "the engine got settings that it does not allow", CHECK),
    (31, "ROBUST_CHANNEL_FIFO_ERROR_MMU_ERR_FLT", "application", "a kernel used an address that is not mapped", CHECK),
    (32, "ROBUST_CHANNEL_PBDMA_ERROR", "application", "the DMA engine found an invalid stream of commands", CHECK),
    (37, "ROBUST_CHANNEL_FECS_ERR_UNIMP_FIRMWARE_METHOD", "application", "a program used an unknown method", CHECK),
    (38, "ROBUST_CHANNEL_FECS_ERR_WATCHDOG_TIMEOUT", "driver", "a switch of contexts ran into its watchdog", WATCH),
    (39, "ROBUST_CHANNEL_CE0_ERROR", "hardware", "copy engine 0 failed", RESTART),
    (40, "ROBUST_CHANNEL_CE1_ERROR", "hardware", "copy engine 1 failed", RESTART),
    (41, "ROBUST_CHANNEL_CE2_ERROR", "hardware", "copy engine 2 failed", RESTART),
    (43, "ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR", "application", "the driver stopped a program after its fault", CHECK),
    (44, "ROBUST_CHANNEL_GR_FAULT_DURING_CTXSW", "driver", "a fault came while contexts were switched", WATCH),
    (45, "ROBUST_CHANNEL_PREEMPTIVE_REMOVAL", "application", "the driver removed what a program had left on the GPU", CHECK),
    (46, "ROBUST_CHANNEL_GPU_TIMEOUT_ERROR", "hardware", "the GPU stopped processing", RESET),
    (48, "ROBUST_CHANNEL_GPU_ECC_DBE", "hardware", "memory had an error of two bits, which ECC cannot correct", RESET),
    (54, "SILENT_RUNNING_PWR_REDUCED_CLOCKING", "hardware", "the board lacks power and lowers its clocks", COOLING),
    (60, "ROBUST_CHANNEL_SEC2_ERROR", "driver", "the security engine failed", RESTART),
    (61, "PMU_BREAKPOINT", "hardware", "the controller of power management stopped or warned", RESET),
    (62, "PMU_HALT_ERROR", "hardware", "the controller of power management halted", RESET),
    (63, "INFOROM_DRAM_RETIREMENT_EVENT", "hardware", "a row of memory was marked for its replacement by a spare one", RESET),
    (64, "INFOROM_DRAM_RETIREMENT_FAILURE", "hardware", "a bad row of memory could not be replaced", VENDOR),
    (66, "ROBUST_CHANNEL_FECS_ERR_REG_ACCESS_VIOLATION", "driver", "the driver used a register that it may not use", WATCH),
    (67, "ROBUST_CHANNEL_FECS_ERR_VERIF_VIOLATION", "driver", "a check of the driver's access to registers failed", WATCH),
    (69, "ROBUST_CHANNEL_GR_CLASS_ERROR", "application", "a program used a class of commands in the wrong way", CHECK),
    (70, "ROBUST_CHANNEL_CE3_ERROR", "hardware", "copy engine 3 failed", RESTART),
    (71, "ROBUST_CHANNEL_CE4_ERROR", "hardware", "copy engine 4 failed", RESTART),
    (72, "ROBUST_CHANNEL_CE5_ERROR", "hardware", "copy engine 5 failed", RESTART),
    (74, "NVLINK_ERROR", "link", "an NVLink had an error", LINK),
    (75, "ROBUST_CHANNEL_CE6_ERROR", "hardware", "copy engine 6 failed", RESTART),
    (76, "ROBUST_CHANNEL_CE7_ERROR", "hardware", "copy engine 7 failed", RESTART),
    (77, "ROBUST_CHANNEL_CE8_ERROR", "hardware", "copy engine 8 failed", RESTART),
    (78, "VGPU_START_ERROR", "driver", "a virtual GPU could not start", UPDATE),
    (79, "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS", "hardware", "the GPU has fallen off the PCIe bus", REBOOT),
    (80, "PBDMA_PUSHBUFFER_CRC_MISMATCH", "hardware", "commands were corrupted on their way to the GPU", RESTART),
    (85, "ROBUST_CHANNEL_CE9_ERROR", "hardware", "copy engine 9 failed", RESTART),
    (92, "EXCESSIVE_SBE_INTERRUPTS", "hardware", "memory has many errors of one bit, which ECC corrects", WATCH),
    (93, "INFOROM_ERASE_LIMIT_EXCEEDED", "hardware", "the memory of the board's own data is worn", WATCH),
    (94, "ROBUST_CHANNEL_CONTAINED_ERROR", "hardware", "an uncorrectable memory error ended a program", RESET),
    (95, "ROBUST_CHANNEL_UNCONTAINED_ERROR", "hardware", "an uncorrectable memory error may have hit any program", RESET),
    (106, "SMBPBI_TEST_MESSAGE", "test", "a test message of the management bus", NOTHING),
    (107, "SMBPBI_TEST_MESSAGE_SILENT", "test", "a silent test message of the management bus", NOTHING),
    (108, "NVLINK_REMOTE_TRANSLATION_ERROR", "link", "an address from another GPU could not be translated", LINK),
    (109, "ROBUST_CHANNEL_CTXSW_TIMEOUT_ERROR", "hardware", "a switch of contexts took too long", RESET),
    (110, "SEC_FAULT_ERROR", "hardware", "the security engine found a fault", RESET),
    (119, "GSP_RPC_TIMEOUT", "driver", "the GPU's system processor (GSP) did not answer the driver", RESET),
    (120, "GSP_ERROR", "driver", "the firmware of the GPU's system processor (GSP) failed", RESET),
    (121, "C2C_ERROR", "link", "the link between chips (C2C) had errors that were corrected", WATCH),
    (136, "ALI_TRAINING_FAIL", "link", "an NVLink could not be trained", LINK),
    (137, "NVLINK_PRIV_ERR", "link", "an access over NVLink to another GPU failed", LINK),
    (140, "UNRECOVERABLE_ECC_ERROR_ESCAPE", "hardware", "the driver found an ECC error that it could not handle", RESET),
    (141, "ROBUST_CHANNEL_FAST_PATH_ERROR", "driver", "the fast path of a channel failed", WATCH),
    (143, "GPU_INIT_ERROR", "hardware", "the GPU could not be initialised", RESET),
    (144, "NVLINK_SAW_ERROR", "link", "the NVLink hardware (SAW) had an error", LINK),
    (145, "NVLINK_RLW_ERROR", "link", "the NVLink hardware (RLW) had an error", LINK),
    (146, "NVLINK_TLW_ERROR", "link", "the NVLink hardware (TLW) had an error", LINK),
    (147, "NVLINK_TREX_ERROR", "link", "the NVLink hardware (TREX) had an error", LINK),
    (148, "NVLINK_NVLPW_CTRL_ERROR", "link", "the NVLink hardware (NVLPW) had an error", LINK),
    (149, "NVLINK_NETIR_ERROR", "link", "the NVLink hardware (NETIR) had an error, or a link went down", LINK),
    (150, "NVLINK_MSE_ERROR", "link", "the NVLink hardware (MSE) had an error", LINK),
    (151, "ROBUST_CHANNEL_KEY_ROTATION_ERROR", "driver", "keys of confidential computing could not be changed", REBOOT),
    (154, "GPU_RECOVERY_ACTION_CHANGED", "hardware", "the GPU asks for another recovery than before", ASKED),
)  # fmt: skip
XIDS: Mapping[int, Xid] = {row[0]: Xid(*row) for row in _ROWS}


def xid_of(code: int) -> Xid:
    """The meaning of a code; one that is not listed is of the kind ``unknown``, which counts as an error."""
    unknown = Xid(code, "not in our list", "unknown", f"see NVIDIA's catalogue, {CATALOGUE}", VENDOR)
    return XIDS.get(code, unknown)
