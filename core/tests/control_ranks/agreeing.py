"""Ranks that tell one another what they have."""

import time

from cases import case, say


@case(3)
def agreement(control, rank):
    from polyscale.errors import RankError

    for number in range(3):
        control.agree("same", {"step": number}, what="step")
    say("shared", control.share("who", {"rank": rank}))
    say("decided", control.decide("tag", f"tag of {rank}"))
    for _ in range(2):  # the same name again must not read the old verdict
        try:
            control.agree("config", {"lr": 0.1, "seed": rank // 2}, what="configuration")
        except RankError as error:
            say("mismatch", str(error))
        control.agree("config", {"lr": 0.1}, what="configuration")
    control.share("end of part", None)
    say("keys left", control.store.num_keys() if rank == 0 else None)
    large = {f"layer.{number}": "x" * 1000 for number in range(9000)}  # more than a value of TCPStore may have
    shared = control.share("large", [rank, large])
    say("large", [shared == [[other, large] for other in range(3)], control.decide("large", large) == large])
    control.agree("large", large, what="large value")
    try:
        control.agree("large", {**large, "layer.8999": rank // 2}, what="large value")
    except RankError as error:
        say("large mismatch", str(error))
    control.share("end of part", None)
    say("keys left after large", control.store.num_keys() if rank == 0 else None)
    control.timeout_s, patience = 1.5, control.timeout_s
    if rank == 2:
        time.sleep(4)
    try:
        control.agree("save", "a", what="save of tag 'a'")
    except RankError as error:
        say("missing", str(error))
    control.timeout_s = patience
    control.share("all again", rank)
