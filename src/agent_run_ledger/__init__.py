"""Durable execution for AI agents: the log under the loop.

Names are resolved when they are first used, so that importing this package loads nothing.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_run_ledger.catalogue import GenaiPrices as GenaiPrices
    from agent_run_ledger.checkpoints import ConsistencyProof as ConsistencyProof
    from agent_run_ledger.checkpoints import InclusionProof as InclusionProof
    from agent_run_ledger.checkpoints import TreeHead as TreeHead
    from agent_run_ledger.drivers.context import StepContext as StepContext
    from agent_run_ledger.drivers.context import current_step as current_step
    from agent_run_ledger.errors import ApprovalDenied as ApprovalDenied
    from agent_run_ledger.errors import ApprovalMismatch as ApprovalMismatch
    from agent_run_ledger.errors import AttemptsExhausted as AttemptsExhausted
    from agent_run_ledger.errors import BackupRefused as BackupRefused
    from agent_run_ledger.errors import BadBundle as BadBundle
    from agent_run_ledger.errors import BadNote as BadNote
    from agent_run_ledger.errors import BudgetExceededException as BudgetExceededException
    from agent_run_ledger.errors import CallBlocked as CallBlocked
    from agent_run_ledger.errors import CopyRefused as CopyRefused
    from agent_run_ledger.errors import EffectConflict as EffectConflict
    from agent_run_ledger.errors import HeadRefused as HeadRefused
    from agent_run_ledger.errors import IllegalTransition as IllegalTransition
    from agent_run_ledger.errors import IntentDrift as IntentDrift
    from agent_run_ledger.errors import InvalidArguments as InvalidArguments
    from agent_run_ledger.errors import InvalidName as InvalidName
    from agent_run_ledger.errors import InvalidPipeline as InvalidPipeline
    from agent_run_ledger.errors import InvalidPrivateList as InvalidPrivateList
    from agent_run_ledger.errors import KeyUnavailable as KeyUnavailable
    from agent_run_ledger.errors import LeaseLost as LeaseLost
    from agent_run_ledger.errors import LedgerError as LedgerError
    from agent_run_ledger.errors import NotALedger as NotALedger
    from agent_run_ledger.errors import NotDurableWarning as NotDurableWarning
    from agent_run_ledger.errors import PayloadErased as PayloadErased
    from agent_run_ledger.errors import PayloadTooLarge as PayloadTooLarge
    from agent_run_ledger.errors import PlainDataWarning as PlainDataWarning
    from agent_run_ledger.errors import ProgramEnded as ProgramEnded
    from agent_run_ledger.errors import Reentered as Reentered
    from agent_run_ledger.errors import ReplayDivergence as ReplayDivergence
    from agent_run_ledger.errors import ReplayStalledWarning as ReplayStalledWarning
    from agent_run_ledger.errors import RunawayLoopDetectedException as RunawayLoopDetectedException
    from agent_run_ledger.errors import RunawayLoopException as RunawayLoopException
    from agent_run_ledger.errors import RunClosed as RunClosed
    from agent_run_ledger.errors import RunDeleted as RunDeleted
    from agent_run_ledger.errors import RunInputMismatch as RunInputMismatch
    from agent_run_ledger.errors import RunMoved as RunMoved
    from agent_run_ledger.errors import RunNotEnded as RunNotEnded
    from agent_run_ledger.errors import RunNotFound as RunNotFound
    from agent_run_ledger.errors import RunOwned as RunOwned
    from agent_run_ledger.errors import SchemaTooNew as SchemaTooNew
    from agent_run_ledger.errors import StepCancelled as StepCancelled
    from agent_run_ledger.errors import StepFailed as StepFailed
    from agent_run_ledger.errors import StepInDoubt as StepInDoubt
    from agent_run_ledger.errors import StoreBusy as StoreBusy
    from agent_run_ledger.errors import StoreCorrupt as StoreCorrupt
    from agent_run_ledger.errors import StoreError as StoreError
    from agent_run_ledger.errors import StoreFull as StoreFull
    from agent_run_ledger.errors import StoreReadOnly as StoreReadOnly
    from agent_run_ledger.errors import StoreUnavailable as StoreUnavailable
    from agent_run_ledger.errors import UndeclaredEffectWarning as UndeclaredEffectWarning
    from agent_run_ledger.errors import UnorderedStep as UnorderedStep
    from agent_run_ledger.errors import UnserialisableArguments as UnserialisableArguments
    from agent_run_ledger.errors import UnserialisableOutput as UnserialisableOutput
    from agent_run_ledger.errors import WaitTimeout as WaitTimeout
    from agent_run_ledger.exporting import verify_bundle as verify_bundle
    from agent_run_ledger.fleet.handle import Handle as Handle
    from agent_run_ledger.fleet.worker import Worker as Worker
    from agent_run_ledger.guard import forge_or_sentinel_guard as forge_or_sentinel_guard
    from agent_run_ledger.heads import HeadLog as HeadLog
    from agent_run_ledger.ledger import AgentRunLedger as AgentRunLedger
    from agent_run_ledger.ledger import compute_fingerprint as compute_fingerprint
    from agent_run_ledger.model import Approval as Approval
    from agent_run_ledger.model import ApprovalRequest as ApprovalRequest
    from agent_run_ledger.model import BlockedCall as BlockedCall
    from agent_run_ledger.model import Budget as Budget
    from agent_run_ledger.model import Collected as Collected
    from agent_run_ledger.model import CopiedRun as CopiedRun
    from agent_run_ledger.model import Cost as Cost
    from agent_run_ledger.model import Evidence as Evidence
    from agent_run_ledger.model import Explanation as Explanation
    from agent_run_ledger.model import Finding as Finding
    from agent_run_ledger.model import Forgotten as Forgotten
    from agent_run_ledger.model import MayRepeat as MayRepeat
    from agent_run_ledger.model import Notice as Notice
    from agent_run_ledger.model import PlannedAction as PlannedAction
    from agent_run_ledger.model import Receipt as Receipt
    from agent_run_ledger.model import RestoredLedger as RestoredLedger
    from agent_run_ledger.model import RetryPolicy as RetryPolicy
    from agent_run_ledger.model import Rewrapped as Rewrapped
    from agent_run_ledger.model import RunRecord as RunRecord
    from agent_run_ledger.model import SharedBudget as SharedBudget
    from agent_run_ledger.model import SharedLimits as SharedLimits
    from agent_run_ledger.model import Spending as Spending
    from agent_run_ledger.model import StepRecord as StepRecord
    from agent_run_ledger.model import StuckRun as StuckRun
    from agent_run_ledger.model import TraceLine as TraceLine
    from agent_run_ledger.model import VerificationReport as VerificationReport
    from agent_run_ledger.model import WorkerRecord as WorkerRecord
    from agent_run_ledger.pipeline import RunLedger as RunLedger
    from agent_run_ledger.pipeline import Step as Step
    from agent_run_ledger.prices import Price as Price
    from agent_run_ledger.prices import PriceBook as PriceBook
    from agent_run_ledger.prices import Prices as Prices
    from agent_run_ledger.redacting import redacted as redacted
    from agent_run_ledger.rules.budget import shared_budget as shared_budget
    from agent_run_ledger.rules.canonical import register_type as register_type
    from agent_run_ledger.rules.loops.policy import LoopDetectorPolicy as LoopDetectorPolicy
    from agent_run_ledger.rules.names import sanitize_identifier as sanitize_identifier
    from agent_run_ledger.run import Run as Run
    from agent_run_ledger.run import current_run as current_run
    from agent_run_ledger.signing import Signer as Signer
    from agent_run_ledger.signing import Verifier as Verifier
    from agent_run_ledger.stores.encryption import Encryption as Encryption
    from agent_run_ledger.usage import Usage as Usage
    from agent_run_ledger.words import Effect as Effect
    from agent_run_ledger.words import Event as Event
    from agent_run_ledger.words import RunState as RunState
    from agent_run_ledger.words import StepState as StepState
    from agent_run_ledger.words import Verdict as Verdict
else:
    _HOMES = {
        "RunNotEnded": "errors",
        "StuckRun": "model",
        "WorkerRecord": "model",
        "Worker": "fleet.worker",
        "Handle": "fleet.handle",
        "WaitTimeout": "errors",
        "ApprovalMismatch": "errors",
        "ApprovalDenied": "errors",
        "Receipt": "model",
        "TraceLine": "model",
        "Forgotten": "model",
        "Collected": "model",
        "CopiedRun": "model",
        "PlannedAction": "model",
        "ApprovalRequest": "model",
        "Approval": "model",
        "StepContext": "drivers.context",
        "current_step": "drivers.context",
        "AttemptsExhausted": "errors",
        "BackupRefused": "errors",
        "BudgetExceededException": "errors",
        "CallBlocked": "errors",
        "CopyRefused": "errors",
        "EffectConflict": "errors",
        "IllegalTransition": "errors",
        "IntentDrift": "errors",
        "InvalidArguments": "errors",
        "InvalidName": "errors",
        "InvalidPipeline": "errors",
        "InvalidPrivateList": "errors",
        "KeyUnavailable": "errors",
        "LeaseLost": "errors",
        "LedgerError": "errors",
        "NotALedger": "errors",
        "NotDurableWarning": "errors",
        "PayloadErased": "errors",
        "PayloadTooLarge": "errors",
        "PlainDataWarning": "errors",
        "ProgramEnded": "errors",
        "Reentered": "errors",
        "ReplayDivergence": "errors",
        "ReplayStalledWarning": "errors",
        "RunClosed": "errors",
        "RunDeleted": "errors",
        "RunInputMismatch": "errors",
        "RunMoved": "errors",
        "RunNotFound": "errors",
        "RunOwned": "errors",
        "RunawayLoopDetectedException": "errors",
        "RunawayLoopException": "errors",
        "SchemaTooNew": "errors",
        "StepCancelled": "errors",
        "StepFailed": "errors",
        "StepInDoubt": "errors",
        "StoreBusy": "errors",
        "StoreCorrupt": "errors",
        "StoreError": "errors",
        "StoreFull": "errors",
        "StoreReadOnly": "errors",
        "StoreUnavailable": "errors",
        "UndeclaredEffectWarning": "errors",
        "UnorderedStep": "errors",
        "UnserialisableArguments": "errors",
        "UnserialisableOutput": "errors",
        "forge_or_sentinel_guard": "guard",
        "AgentRunLedger": "ledger",
        "compute_fingerprint": "ledger",
        "Budget": "model",
        "SharedBudget": "model",
        "SharedLimits": "model",
        "Spending": "model",
        "Explanation": "model",
        "Evidence": "model",
        "Encryption": "stores.encryption",
        "Cost": "model",
        "BlockedCall": "model",
        "MayRepeat": "model",
        "Notice": "model",
        "Effect": "words",
        "Event": "words",
        "Finding": "model",
        "RestoredLedger": "model",
        "RetryPolicy": "model",
        "RunRecord": "model",
        "RunState": "words",
        "Rewrapped": "model",
        "StepRecord": "model",
        "StepState": "words",
        "TreeHead": "checkpoints",
        "InclusionProof": "checkpoints",
        "ConsistencyProof": "checkpoints",
        "BadBundle": "errors",
        "BadNote": "errors",
        "verify_bundle": "exporting",
        "HeadRefused": "errors",
        "HeadLog": "heads",
        "Signer": "signing",
        "Verifier": "signing",
        "Verdict": "words",
        "VerificationReport": "model",
        "RunLedger": "pipeline",
        "Step": "pipeline",
        "redacted": "redacting",
        "shared_budget": "rules.budget",
        "register_type": "rules.canonical",
        "LoopDetectorPolicy": "rules.loops.policy",
        "sanitize_identifier": "rules.names",
        "GenaiPrices": "catalogue",
        "Price": "prices",
        "PriceBook": "prices",
        "Prices": "prices",
        "Usage": "usage",
        "Run": "run",
        "current_run": "run",
    }

    def __getattr__(name):
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
        return value

    def __dir__():
        return sorted({*globals(), *_HOMES})


__all__ = [
    "AgentRunLedger",
    "Approval",
    "ApprovalDenied",
    "ApprovalMismatch",
    "ApprovalRequest",
    "AttemptsExhausted",
    "BackupRefused",
    "BlockedCall",
    "BadBundle",
    "BadNote",
    "Budget",
    "BudgetExceededException",
    "CallBlocked",
    "ConsistencyProof",
    "Forgotten",
    "Collected",
    "CopiedRun",
    "CopyRefused",
    "Encryption",
    "Cost",
    "Effect",
    "EffectConflict",
    "Event",
    "Evidence",
    "Explanation",
    "Finding",
    "GenaiPrices",
    "Handle",
    "HeadLog",
    "HeadRefused",
    "IllegalTransition",
    "InclusionProof",
    "IntentDrift",
    "InvalidArguments",
    "InvalidName",
    "InvalidPipeline",
    "InvalidPrivateList",
    "KeyUnavailable",
    "LeaseLost",
    "LedgerError",
    "LoopDetectorPolicy",
    "MayRepeat",
    "NotALedger",
    "NotDurableWarning",
    "Notice",
    "PayloadErased",
    "PayloadTooLarge",
    "PlainDataWarning",
    "PlannedAction",
    "Price",
    "PriceBook",
    "Prices",
    "ProgramEnded",
    "Receipt",
    "Reentered",
    "ReplayDivergence",
    "ReplayStalledWarning",
    "RestoredLedger",
    "RetryPolicy",
    "Run",
    "RunClosed",
    "RunDeleted",
    "RunInputMismatch",
    "RunLedger",
    "RunMoved",
    "RunNotEnded",
    "RunNotFound",
    "RunOwned",
    "RunRecord",
    "RunState",
    "RunawayLoopDetectedException",
    "RunawayLoopException",
    "SchemaTooNew",
    "SharedBudget",
    "SharedLimits",
    "Signer",
    "Spending",
    "Step",
    "StepCancelled",
    "StepContext",
    "StepFailed",
    "StepInDoubt",
    "Rewrapped",
    "StepRecord",
    "StepState",
    "StoreBusy",
    "StoreCorrupt",
    "StoreError",
    "StoreFull",
    "StoreReadOnly",
    "StoreUnavailable",
    "StuckRun",
    "TraceLine",
    "TreeHead",
    "UndeclaredEffectWarning",
    "UnorderedStep",
    "UnserialisableArguments",
    "UnserialisableOutput",
    "Usage",
    "Verdict",
    "VerificationReport",
    "Verifier",
    "WaitTimeout",
    "Worker",
    "WorkerRecord",
    "compute_fingerprint",
    "current_run",
    "current_step",
    "forge_or_sentinel_guard",
    "redacted",
    "register_type",
    "sanitize_identifier",
    "shared_budget",
    "verify_bundle",
]
