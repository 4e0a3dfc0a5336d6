"""The default text of `minirt compare`: a page with several kinds of writing, written for this purpose."""

TEXT = """\
The lighthouse keeper counted the ships each evening. On Monday there were seven, on Tuesday eleven, and on \
Wednesday the fog was so thick that she counted only the horns. "Three," she wrote in the book, "or one that is very\
 impatient." Her brother, who carried the oil up the stairs, thought that a horn was worth half a ship at most. They\
 argued about it until the lamp was lit.

In the morning the fog had gone, and so had the small boat that was always tied to the pier. It turned up two days \
later, nine miles down the coast, with a basket of apples in it and nobody at the oars. No one ever found out whose \
apples they were, but they were good, and the pie lasted until Sunday.

A heat pump moves heat instead of making it. A fluid evaporates outside, where it is cold, and takes up heat as it \
does; a compressor raises its pressure and with it its temperature; inside it condenses and gives that heat away. \
For each kilowatt hour of electricity it delivers three or four of heat, because most of the energy comes from the \
air or the ground. The colder it is outside, the less there is to gain: at -10 °C the factor may fall to 2.

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

Question: A train leaves at 9:40 and arrives at 12:15. How long does it take?
Answer: From 9:40 to 12:00 are 2 hours and 20 minutes, and 15 minutes more make 2 hours and 35 minutes.

Dear Mr. Okafor, thank you for your letter of 3 March. The two chairs that you ordered left our workshop yesterday \
and should be with you by Friday. As agreed, the price is 480 euros for both, delivery included. If a leg should \
wobble, please do not mend it yourself: write to us, and we will send somebody. With kind regards, Ines Duarte

To plant a hedge, dig a trench as deep as your spade and twice as wide. Set the young shrubs a foot apart, press the\
 earth firmly around their roots, and water them well, even if it rains. In the first summer they will look as if \
nothing happened. In the second they grow, and in the third the neighbours ask where you bought them.
"""
