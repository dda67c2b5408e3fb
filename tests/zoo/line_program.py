"""A program that reads lines of ids and writes scores, perhaps with a fault.

    python line_program.py MODE

The scores are a weighted sum of table rows, one for each id so far.
The program needs only Python and starts within milliseconds.
"""

import os
import signal
import struct
import sys
import time

VOCAB, BLOCK = 7, 12
GREETINGS = {
    **dict.fromkeys(("cache", "shifted", "stale"), "cache"),
    "sizes": f"vocab_size={VOCAB} block_size={BLOCK}",
    "binary": "binary",
    "chatty": "Loading the model ...",
}


def table(i, j):
    return ((i * 5 + j * 3) % 11) / 7 + 0.01 * i * j


def scores(ids, before=()):
    """Return a row of scores for each id; `before` are earlier ids."""
    sums, rows = [0.0] * VOCAB, []
    for t, i in enumerate([*before, *ids]):
        new = [table(i, j) * (1 + t / 10) for j in range(VOCAB)]
        sums = [0.7 * old + one for old, one in zip(sums, new, strict=True)]
        rows.append(sums)
    return rows[len(before) :]


def text_of(rows, form="%.9g"):
    return " ".join(form % s for row in rows for s in row)


def say(text):
    print(text, flush=True)


# --- Answers to a line of ids; `number` is the index of the line -------------


def sound(ids, number):
    say(text_of(scores(ids)))


def coarse(ids, number):
    say(text_of(scores(ids), "%.2f"))


def binary(ids, number):
    found = [s for row in scores(ids) for s in row]
    sys.stdout.buffer.write(struct.pack("<I", len(found)))
    sys.stdout.buffer.write(struct.pack(f"<{len(found)}f", *found))
    sys.stdout.flush()


def leak(ids, number):
    """Let the third row of scores depend on the later ids."""
    rows = scores(ids)
    if len(rows) > 2:
        rows[2][0] += sum(table(i, 1) for i in ids[3:])
    say(text_of(rows))


def random(ids, number):
    more = os.urandom(1)[0] / 256
    say(text_of([[s + more for s in row] for row in scores(ids)]))


def counts(ids, number):
    say(text_of([[s + number / 10 for s in r] for r in scores(ids)]))


waiting = [""]


def late(ids, number):
    """Answer each line with the scores of the previous line."""
    say(waiting.pop())
    waiting.append(text_of(scores(ids)))


def late_by_one(ids, number):
    """Answer the first line at once, and each later line one line late."""
    waiting[0] = waiting[0] or text_of(scores(ids))
    late(ids, number)


def unflushed(ids, number):
    """Keep every answer, as in an output buffer that is never flushed."""
    waiting.append(text_of(scores(ids)))


def last_only(ids, number):
    say(text_of(scores(ids)[-1:]))


def two_lines(ids, number):
    sound(ids, number)
    say("ok")


def first_only(then):
    """Return a function that answers single ids, and else calls `then`."""

    def answer(ids, number):
        sound(ids, number) if len(ids) == 1 else then()

    return answer


def complain(words):
    print(words, file=sys.stderr, flush=True)


def hang():
    complain("thinking")
    time.sleep(1000)


def die():
    complain("out of memory")
    sys.exit(5)


ANSWERS = {
    "coarse": coarse,
    "binary": binary,
    "leak": leak,
    "random": random,
    "counts": counts,
    "late": late,
    "late by one": late_by_one,
    "unflushed": unflushed,
    "last only": last_only,
    "two lines": two_lines,
    "hangs": first_only(hang),
    "dies": first_only(die),
    "garbage": first_only(lambda: say("token 3: 0.1 0.2")),
    "60 letters": first_only(lambda: say("x" * 60)),
    "61 letters": first_only(lambda: say("x" * 61)),
    "killed": first_only(lambda: os.kill(os.getpid(), signal.SIGKILL)),
}


def refuse(mode):
    if mode == "exits":
        sys.exit("assertion failed: len(ids) <= BLOCK")
    say(f"error at most {BLOCK} ids below {VOCAB}")


def begin(mode):
    if mode in GREETINGS:
        say(GREETINGS[mode])
    if mode == "stderr":
        complain("Loading the model ...")
    if mode == "no start":
        complain("no such weights: w.bin")
        sys.exit(3)
    if mode == "never answers":
        time.sleep(1000)


def main(mode):
    begin(mode)
    answer, kept = ANSWERS.get(mode, sound), []
    for number, line in enumerate(sys.stdin):
        word = line.split()[0]
        ids = [int(i) for i in line.split() if i.lstrip("-").isdigit()]
        if mode == "unbounded":
            ids = [i % VOCAB for i in ids]
        if word == "reset":
            kept = kept if mode == "stale" else []
        elif len(ids) > BLOCK or not all(0 <= i < VOCAB for i in ids):
            refuse(mode)
        elif word == "feed":
            say(text_of(scores(ids, kept)))
            kept += ids[1:] if mode == "shifted" else ids
        else:
            answer(ids, number)


if __name__ == "__main__":
    main(sys.argv[1])
