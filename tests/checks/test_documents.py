"""Documents that the user declares, and facts that are only reported."""

import re
from functools import partial

import pytest
import torch
from odd_models import BlocksDropped, GivenBlocks
from rows import slow_unless
from small_gpt import GPT, Packed, Padded, cross_entropy, positions

from gpt_duet.invariants import check_model

pytestmark = [
    pytest.mark.usefixtures("one_layer"),
    pytest.mark.unhooked,
]
MARK = 3


class Marked(Packed):
    """Documents end with a certain id."""

    ends = True

    def forward(self, tokens):
        marks = (tokens == MARK).long()
        count = marks.cumsum(1)
        return super().forward(tokens, count - marks if self.ends else count)


class MarkedAtTheStart(Marked):
    """Documents start with a certain id."""

    ends = False


class MarkedInVain(Marked):
    """Documents end with a certain id, but see each other."""

    def apart(self, mask, same):
        return mask


class Counted(Packed):
    """A model that takes the lengths of documents."""

    def forward(self, tokens, sizes=None):
        if sizes is None:
            return super().forward(tokens)
        ids = torch.arange(len(sizes)).repeat_interleave(sizes)
        return super().forward(tokens, ids.expand(len(tokens), -1))


class CountedInVain(Counted):
    """The model takes the lengths of documents, but they see each other."""

    apart = MarkedInVain.apart


class CountedWhole(Counted):
    """Lengths of documents are given; each token sees its whole document."""

    def apart(self, mask, same):
        return same


class NamedOddly(Packed):
    """The model takes documents by an argument whose name does not say so."""

    def forward(self, tokens, packs=None):
        return super().forward(tokens, packs)


class StartsAgain(Packed):
    """Each position 0 begins a document, unless a mask is given."""

    def forward(self, tokens, attention_mask=None, position_ids=None):
        if position_ids is None or attention_mask is not None:
            return super().forward(tokens)
        return super().forward(tokens, (position_ids == 0).cumsum(1))


class StartsAgainUncached(StartsAgain):
    """Each position 0 begins a document, but only in calls without a cache."""

    def forward(self, tokens, position_ids=None, use_cache=True):
        at = None if use_cache else position_ids
        return super().forward(tokens, None, at)


class NoDocuments(GPT):
    """The model takes positions, but they say nothing about documents."""

    def forward(self, tokens, position_ids=None):
        return super().forward(tokens)


class FromOne(Packed):
    """Document 0 is padding, where each token sees only itself."""

    def forward(self, tokens, doc_ids=None):
        self.ids = doc_ids
        return super().forward(tokens, doc_ids)

    def apart(self, mask, same):
        own = torch.eye(mask.size(-1), dtype=torch.bool)
        return mask & same & ((self.ids > 0).unsqueeze(1) | own)


class WithLoss(Packed):
    """The model shifts labels over the whole row, across documents."""

    def forward(self, tokens, doc_ids=None, labels=None):
        logits = super().forward(tokens, doc_ids)
        if labels is None:
            return logits, None
        return logits, cross_entropy(logits[:, :-1], labels[:, 1:])


class MaskOfTheUser(Padded):
    """A 4-D attention mask is added to scores; a 2-D mask hides padding."""

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None or attention_mask.dim() == 2:
            return super().forward(tokens, attention_mask)
        return self.of_mask(tokens, attention_mask)

    def of_mask(self, tokens, mask):
        return self.scores(self.body(self.embed(tokens), mask[0, 0] == 0))

    def position_vectors(self, tokens):
        return 0.0


class BooleanMask(MaskOfTheUser):
    """A boolean mask says what is visible; positions come with the mask."""

    def forward(self, tokens, attention_mask=None, position_ids=None):
        self.at = position_ids
        return super().forward(tokens, attention_mask)

    def of_mask(self, tokens, mask):
        return self.scores(self.body(self.embed(tokens), mask[0]))

    def position_vectors(self, tokens):
        return self.wpe(positions(tokens) if self.at is None else self.at)


class Numbered(MaskOfTheUser):
    """The attention mask numbers the documents from 1; 0 means padding."""

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            return GPT.forward(self, tokens)
        same = self.same(attention_mask.long())
        own = torch.eye(tokens.size(1), dtype=torch.bool)
        mask = self.mask(tokens) & (same | own)
        return self.scores(self.body(self.embed(tokens), mask))

    def same(self, ids):
        return (ids.unsqueeze(1) == ids.unsqueeze(2)) & (ids > 0).unsqueeze(1)


class MaskInVain(MaskOfTheUser):
    """The model ignores a 4-D mask; it applies only the causal mask."""

    def of_mask(self, tokens, mask):
        return self.scores(self.body(self.embed(tokens), self.mask(tokens)))


class BooleanMaskInVain(BooleanMask):
    """The model ignores a boolean mask; it applies only the causal mask."""

    of_mask = MaskInVain.of_mask


class NumberedInVain(Numbered):
    """All tokens with a number other than 0 see each other."""

    def same(self, ids):
        return (ids > 0).unsqueeze(1)


def seen(lengths):
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return (ids.unsqueeze(1) == ids).tril()


def added(lengths):
    mask = torch.where(seen(lengths), 0.0, -torch.inf)
    return {"attention_mask": mask[None, None]}


def booleans(lengths):
    at = torch.cat([torch.arange(n) for n in lengths])
    return {"attention_mask": seen(lengths)[None], "position_ids": at[None]}


def numbers(lengths):
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return {"attention_mask": 1 + ids[None]}


def sizes(lengths):
    return {"sizes": torch.tensor(lengths)}


ROWS = [
    (Marked, MARK, "passed", "apart by id 3 at the end of each$"),
    (MarkedAtTheStart, MARK, "passed", "apart by id 3 at the start of each$"),
    (MarkedInVain, MARK, "failed", "document 0 of .* moves the scores of doc"),
    (
        Counted,
        sizes,
        "passed",
        r"^proved at .* another, .* apart by sizes\(\)",
    ),
    (CountedInVain, sizes, "failed", r"let through at small_gpt\.py"),
    (
        CountedInVain,
        sizes,
        "failed",
        r"; way: small_gpt\.py:\d+ `scores\.masked_fill",
    ),
    (Packed, "doc_ids", "passed", "^proved at .*apart by doc_ids$"),
    (FromOne, None, "passed", "apart by doc_ids counted from 1$"),
    (WithLoss, None, "passed", "the loss counts the first token of a docum"),
    (
        StartsAgain,
        None,
        "passed",
        "^no promise; documents are isolated by position_ids; not together "
        r"with an attention mask of ones: 0\.",
    ),
    (StartsAgain, "position_ids", "failed", "position_ids and an attention"),
    (
        StartsAgainUncached,
        None,
        "passed",
        "isolated by position_ids with use_cache=False; not without it: 0",
    ),
    (
        StartsAgainUncached,
        "position_ids",
        "failed",
        "; position_ids with use_cache=False they are apart",
    ),
    (NoDocuments, None, "passed", "are not isolated by position_ids: 0"),
    (NoDocuments, "position_ids", "failed", "moves the scores of document"),
    (GivenBlocks, None, "passed", "; isolated by block_mask and position_ids"),
    (GivenBlocks, "block_mask", "passed", "^proved at .* by block_mask and p"),
    (BlocksDropped, "block_mask", "failed", "moves the scores of document"),
    (MaskOfTheUser, added, "passed", r"apart by added\(\)$"),
    (MaskInVain, added, "failed", "moves the scores of document"),
    (BooleanMask, booleans, "passed", r"apart by booleans\(\)$"),
    (BooleanMaskInVain, booleans, "failed", "moves the scores of document"),
    (Numbered, numbers, "passed", r"apart by numbers\(\)$"),
    (NumberedInVain, numbers, "failed", "moves the scores of document"),
    (Numbered, "attention_mask", "passed", "apart by attention_mask counted"),
    (NumberedInVain, "attention_mask", "failed", "moves the scores of docum"),
    (GPT, None, "skipped", "name it with documents=..., in the shell --doc"),
]


@pytest.mark.parametrize(
    ("model", "documents", "status", "words"),
    slow_unless(lambda *row: row[2] == "failed" or row == ROWS[0], ROWS),
)
def test_check_documents_says_what_keeps_documents_apart(
    model, documents, status, words
):
    report = check_model(model, checks=["documents"], documents=documents)
    (result,) = report.results
    assert result.status == status, result.message

    assert re.search(words, result.message), result.message


def test_documents_of_a_function_reach_the_other_checks():
    """The proof of causality covers texts with documents."""
    for model, documents, words in (
        (Counted, sizes, "^proved at .* tokens;"),
        (CountedWhole, sizes, "position 1 sees token 2: .*, with sizes"),
        (NamedOddly, "packs", "^proved at .* tokens;"),
    ):
        report = check_model(model, checks=["causality"], documents=documents)
        assert report.ok == (model is not CountedWhole), report
        assert not report.never_given
        assert re.search(words, report.results[0].message), report


def test_a_text_of_one_document_is_used_whole():
    """Undeclared documents make the context of a text look short."""
    model = partial(Marked, vocab_size=5)
    assert not check_model(model, checks=["context_use"]).ok
    assert check_model(model, checks=["context_use"], documents=MARK).ok


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ("doc_id", "documents name doc_id, which the call does not take: it"),
        (17, "id 17 separates documents, and is outside the vocabulary of 17"),
    ],
)
def test_impossible_documents_are_refused(documents, words):
    with pytest.raises(ValueError, match=words):
        check_model(Packed, checks=["documents"], documents=documents)


class PackedForTargets(Packed):
    """Documents do not see each other, whether targets are given or not."""

    def forward(self, tokens, doc_ids=None, targets=None):
        logits = super().forward(tokens, self.given(doc_ids, targets))
        if targets is None:
            return logits
        return logits, cross_entropy(logits, targets)

    def given(self, doc_ids, targets):
        return doc_ids


class TogetherWithTargets(PackedForTargets):
    """If targets are given, documents see each other."""

    def given(self, doc_ids, targets):
        return doc_ids if targets is None else None


@pytest.mark.parametrize(
    ("model", "start"),
    [(PackedForTargets, "proved"), (TogetherWithTargets, "not proved")],
)
def test_documents_are_proved_apart_with_targets_as_well(model, start):
    (result,) = check_model(model, checks=["documents"]).results
    assert result.message.startswith(start), result.message
