"""A call and its outcome as the rules see them: digests for what is equal, and a bounded text for what is alike."""

from __future__ import annotations

from agent_run_ledger.rules.loops import similarity, wording

TYPE_CHECKING = False  # `typing` is not needed at run time, and not free to import
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent_run_ledger.rules.loops.similarity import Embedder

LOOKED_AT = 4096
"""Arguments and outputs of more bytes are not looked at: they are equal or not, by their digests."""
ERRORS_LOOKED_AT = 16384
"""The same for errors, which are stored with their tracebacks."""
RECENT = 6
"""So many of the last calls are compared piece by piece; those before them only where the outcome is equal."""


class Asked:
    """What is asked for: a tool and its arguments. What is worked out of them is worked out when it is needed, once."""

    _key: str | None = None
    _fields: wording.Fields | None = None
    _names: list[str] | None = None
    _letters: str | None = None
    _words: dict[str, int] | None = None
    _floats: Sequence[float] | None = None

    def __init__(self, tool: str, input: str, text: str | None) -> None:
        self.tool = tool
        self.input = input
        """Equal for equal arguments, such as their digest."""
        self.text = text
        """The canonical arguments; None where they are too long to be looked at, or erased."""

    @property
    def key(self) -> str:
        """Equal for arguments that differ at most in case, in spaces, and in fields which, by their names, differ in every call."""
        if self._key is None:
            if self.text is None:
                self._key = self.input
            else:
                self._names = wording.names(self.text)
                self._key = wording.steady_arguments(self.text, self._names)
        return self._key

    def is_again(self, other: Asked) -> bool:
        """Whether it is the same question."""
        return self.tool == other.tool and (self.input == other.input or self.key == other.key)

    def rewords(self, other: Asked) -> bool:
        """Whether it asks about the same in other words, and not for the next of many things."""
        if self.text is None or other.text is None:
            return False
        mine = self._letters if self._letters is not None else self._spell()
        its = other._letters if other._letters is not None else other._spell()
        if (
            mine and its and mine != its and self._names == other._names
        ):  # dozens of times at a step, where all answers are equal
            return False
        return wording.is_reworded(self._in_fields(), other._in_fields())

    def replaces(self, other: Asked) -> bool:
        """Whether it is about something else than the other, within the same frame of words."""
        if self.text is None or other.text is None:
            return False
        return wording.is_replaced(self._in_fields(), other._in_fields())

    def _spell(self) -> str:
        text = self.text or ""
        if self._names is None:
            self._names = wording.names(text)
        self._letters = wording.letters(text, self._names)
        return self._letters

    def _in_fields(self) -> wording.Fields:
        if self._fields is None:
            self._fields = wording.fields(self.text or "null")
        return self._fields

    def likeness(self, other: Asked, embedder: Embedder | None) -> float:
        """The cosine of the two inputs: 1 for the same question, 0 for another tool or where a text is missing."""
        if self.tool != other.tool:
            return 0.0
        if self.input == other.input or self.key == other.key:
            return 1.0
        if self.text is None or other.text is None:
            return 0.0
        if embedder is not None:
            try:
                return similarity.cosine(self._embedded(embedder), other._embedded(embedder))
            except (
                Exception
            ) as error:  # somebody else's code: what a step has answered is worth more, and words can be counted
                import logging

                said = f"{type(error).__name__}: {error}"
                logging.getLogger("agent_run_ledger").error(
                    "words are counted instead, for the embedder fails: %s", said
                )
        return similarity.cosine_of_words(self._counted(), other._counted())

    def _counted(self) -> dict[str, int]:
        if self._words is None:
            self._words = similarity.count_words(self.text or "")
        return self._words

    def _embedded(self, embedder: Embedder) -> Sequence[float]:
        if self._floats is None:
            self._floats = embedder(self.text or "")
        return self._floats


class Call(Asked):
    """One call and how it ended."""

    is_known: bool | None = None
    """Whether it told nothing that the calls before it had not told: set by whoever has compared it with those."""
    is_like_last: bool | None = None
    """Whether it asked nearly the same as the step before it and was told the same: set by whoever has compared them."""
    _error: bool | None = None
    _bare: bool | None = None
    _transient: bool | None = None
    _pieces: list[str] | None = None
    _complaint: str | None = None

    def __init__(
        self,
        number: int,
        tool: str,
        input: str,
        outcome: str,
        text: str | None = None,
        answer: str | None = None,
        is_error: bool = False,
        may_repeat: bool = False,
        write: bool | None = None,
        is_thought: bool = False,
    ) -> None:
        self.number = number
        """The step's number, from 1."""
        self.tool, self.input, self.text = tool, input, text
        self.outcome = outcome
        """Equal for equal outputs, and for errors of equal type and message."""
        self.answer = answer
        """The output, as it is where it is a text and else as canonical JSON, or `Type: message` of the error; None as for `text`."""
        self.has_raised = is_error
        self.may_repeat = may_repeat
        self.write = write
        """Whether it changed something; None where nobody says."""
        self.is_thought = is_thought
        """Whether it is the call of a model, which thinks about the steps and takes none."""

    @property
    def is_error(self) -> bool:
        """Whether it failed, or returned an error as its output."""
        if self._error is None:
            self._error = self.has_raised or (self.answer is not None and wording.is_error_text(self.answer))
        return self._error

    @property
    def is_transient(self) -> bool:
        """Whether it failed in a way that passes."""
        if self._transient is None:
            self._transient = self.is_error and self.answer is not None and wording.is_transient(self.answer)
        return self._transient

    @property
    def is_bare(self) -> bool:
        """Whether its answer is a mere acknowledgement, from which nothing can be learnt."""
        if self._bare is None:
            self._bare = self.answer is not None and wording.is_bare(self.answer, self.text or "")
        return self._bare

    @property
    def is_aside(self) -> bool:
        """Whether it is a thought or a note: no step of the work."""
        return self.is_thought or (self.text is not None and wording.is_aside(self.text) and self.is_bare)

    @property
    def is_idle(self) -> bool:
        """Whether it asked for nothing and got nothing."""
        return self.text is not None and wording.is_nothing(self.text) and self.is_bare

    def answers_like(self, other: Call) -> bool:
        """Whether the two outcomes tell the same, whatever was asked."""
        if self.outcome == other.outcome:
            return True
        may_differ = wording.is_volatile_in_error if self.is_error else wording.is_volatile
        return self.is_error is other.is_error and self._differs_only_in(other, may_differ)

    def repeats(self, other: Call) -> bool:
        """Whether the same was asked and the same was answered; a fresh id in the answer of a write makes no other answer."""
        if self.may_repeat or other.may_repeat or not self.is_again(other):
            return False
        if self.answers_like(other):
            return True
        if self.write is False or self.is_error or other.is_error or self.answer is None or other.answer is None:
            return False
        mine, its = self._in_pieces(), other._in_pieces()
        if self.write and wording.are_mostly_equal(mine, its):
            return True
        if not self._differs_only_in(other, wording.is_fresh):
            return False
        # Where nothing but an id is answered it may be all that there is to know: the next job, say.
        return self.write is True or len(set(mine).intersection(its)) >= _MORE_THAN_AN_ID

    def _differs_only_in(self, other: Call, may_differ: Callable[[str], bool]) -> bool:
        mine, its = self.answer, other.answer
        if mine is None or its is None or abs(len(mine) - len(its)) > _SLACK or mine[:2] != its[:2]:
            return False  # ids and times are about as long each time, and are not what an answer begins with
        return wording.differ_only_in(self._in_pieces(), other._in_pieces(), may_differ)

    def complains_like(self, other: Call) -> bool:
        """Whether two errors of a tool are the same but for what each repeats of its own question."""
        if (
            not (self.is_error and other.is_error and self.tool == other.tool)
            or self.answer is None
            or other.answer is None
        ):
            return False
        return self._complains() == other._complains()

    def is_known_from(self, earlier: Sequence[Call]) -> bool:
        """Whether whoever has made the earlier calls learns nothing by this one.

        It asks again and is answered again, if only in other words that have all been said; or it asks the same tool in other words and
        the answer is known; or it fails as another one did, whatever was asked and of whom.
        """
        if self.may_repeat or not earlier:
            return False
        outcome, tool, key, is_error = self.outcome, self.tool, self.key, self.is_error
        may_be_known = is_error or not self.is_bare
        long_ago = [call for call in earlier[:-RECENT] if call.outcome == outcome]
        again: list[Call] = []
        for call in reversed([*long_ago, *earlier[-RECENT:]]):
            if tool == call.tool and (self.input == call.input or key == (call._key or call.key)):
                if self.repeats(call):
                    return True
                again.append(call)
            elif (
                may_be_known
                and (is_error or tool == call.tool)
                and not call.may_repeat
                and (is_error or self.rewords(call))
                and (outcome == call.outcome or self.answers_like(call))
            ):
                return not self.is_bare
        return len(again) > 1 and self._says_only_what_these_said(again)

    def _says_only_what_these_said(self, again: Sequence[Call]) -> bool:
        """Two programs that write into one answer at once never give it twice in the same order."""
        left = set(self._in_pieces())
        much = len(left) // 2
        for call in again:
            left.difference_update(call._in_pieces())
            if not left:
                return self.answer is not None
            if len(left) > much:
                break
        return False

    def _in_pieces(self) -> list[str]:
        if self._pieces is None:
            self._pieces = wording.pieces(self.answer or "")
        return self._pieces

    def _complains(self) -> str:
        if self._complaint is None:
            self._complaint = wording.complaint(self.answer or "", self.text or "")
        return self._complaint


_SLACK = 64
_MORE_THAN_AN_ID = 2
