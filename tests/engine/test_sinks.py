"""Which sink takes the outputs of which request.

Catches outputs that reach another caller, several deliveries for one step, a request that stays open after its end, and one
exception object that several threads raise.
"""

from minirt.engine.request import TokenOutput
from minirt.engine.sinks import Sinks
from minirt.errors import EngineError


class Box:
    def __init__(self, act=lambda: None):
        self.got, self.act = [], act

    def put(self, outputs):
        self.got.append([(own.request_id, own.token_ids, own.finish_reason) for own in outputs])
        self.act()


def output(request_id, token, reason=None):
    return TokenOutput(request_id, (token,), reason)


def test_a_step_is_one_delivery_for_each_sink():
    sinks, a, b = Sinks(), Box(), Box()
    for request_id, box in ((1, a), (2, b), (3, a), (4, b)):
        sinks[request_id] = box
    assert sinks.drop([4, 9]) == [4], "9 was never open"
    sinks.deliver([output(3, 30), output(2, 20, "stop"), output(4, 40), output(1, 10), output(7, 70)])
    assert a.got == [[(3, (30,), None), (1, (10,), None)]]
    assert b.got == [[(2, (20,), "stop")]]
    assert sorted(sinks) == [1, 3]
    sinks.deliver([output(2, 21), output(1, 11, "length")])
    assert b.got[1:] == []
    assert list(sinks) == [3]
    assert sinks.drop([1, 2]) == []


def test_a_sink_may_drop_requests_while_it_takes_outputs():
    """As a reader that is too slow does. What has arrived with them is delivered; nothing after it."""
    sinks = Sinks()
    slow, other = Box(lambda: sinks.drop([1, 2])), Box()
    for request_id, box in ((1, slow), (2, slow), (3, other)):
        sinks[request_id] = box
    for _ in range(2):
        sinks.deliver([output(1, 10), output(3, 30), output(2, 20, "stop")])
    assert slow.got == [[(1, (10,), None), (2, (20,), "stop")]]
    assert other.got == [[(3, (30,), None)]] * 2
    assert list(sinks) == [3]


def test_each_request_fails_with_an_exception_of_its_own():
    class Errors:
        def put(self, outputs):
            found.extend(outputs)

    sinks, found, cause = Sinks(), [], ValueError("why")
    for request_id in (1, 2, 3):
        sinks[request_id] = Errors()
    error = EngineError("ended", where="here", hint="do this")
    error.__cause__ = cause
    sinks.fail([1, 3, 8], error)
    assert [own.request_id for own in found] == [1, 3]
    assert {own.finish_reason for own in found} == {"error"}
    assert len({id(own.error) for own in found} | {id(error)}) == 3
    assert all(str(own.error) == str(error) and own.error.__cause__ is cause for own in found)
    assert list(sinks) == [2]
