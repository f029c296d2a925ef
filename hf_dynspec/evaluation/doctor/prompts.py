"""Texts of several kinds for those who have no prompts at hand. Base models go on with them; they ask nothing."""

from ..prompts import WorkloadPrompt

_CODE = '''import csv
from dataclasses import dataclass


@dataclass
class Order:
    """An order that a customer made."""

    number: int
    customer: str
    amount: float

    def is_large(self) -> bool:
        return self.amount > 1000


def read_orders(path):
    """Read the orders of a file, one in each row."""
    orders = []
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            order = Order(int(row["number"]), row["customer"], float(row["amount"]))
            orders.append(order)
    return orders


def sum_by_customer(orders):
    """Add up the amounts of each customer's orders."""
'''

_LAW = """Section 12. Return of deposits.

(a) Within thirty days after the tenant has left the premises, the owner shall return the deposit to the tenant, with
interest, or shall state in writing for what part of it he intends to keep it.

(b) The owner may keep of the deposit only what is needed to pay for damage that the tenant has done, and for rent that
is due. He may not keep any part of it for ordinary wear.

(c) Where the owner fails to comply with subsection (a) of this section, the tenant may bring an action in the court of
the district in which the premises are situated, and the court may order the owner to pay
"""

_MEDICINE = """What are the symptoms of iron deficiency?

People with a mild deficiency often have no symptoms at all. As the body runs out of iron, the blood carries less
oxygen, and patients may feel tired and weak. Other symptoms are pale skin, headache, shortness of breath and a fast
heartbeat. Some patients have brittle nails or a sore tongue. In children, the deficiency can slow down growth.

How is iron deficiency diagnosed?

The doctor asks about symptoms and takes a blood sample. The test measures
"""

_STORY = """It was late in the evening when the coach came down the hill, and the rain had not ceased since noon. The
driver, an old man with a grey beard, held the reins in one hand and his hat in the other. "We shall not reach the town
tonight," said he to the young lady beside him; "the bridge is gone, and there is no other road for many miles."

She looked at him without a word. Then she drew her cloak more closely about her shoulders, and said, "There is a house
behind those trees. I have seen a light in the window. Let us ask whether
"""

_MATHS = """Question: A baker makes 48 loaves in the morning and half as many in the afternoon. He sells each loaf for
$3. How much money does he make in one day?
Answer: In the afternoon he makes 48 / 2 = 24 loaves. In one day he makes 48 + 24 = 72 loaves. He makes 72 * 3 = $216.

Question: Anna reads 15 pages on Monday and twice as many on Tuesday. On Wednesday she reads 10 pages fewer than on
Tuesday. How many pages does she read in three days?
Answer: On Tuesday she reads"""

_GERMAN = """§ 4 Rückgabe der Kaution

(1) Der Vermieter hat dem Mieter die Kaution innerhalb von sechs Monaten nach dem Ende des Mietverhältnisses
zurückzugeben. Er darf einen Teil davon behalten, soweit dies zur Deckung seiner Ansprüche erforderlich ist.

(2) Über die Höhe der Ansprüche hat der Vermieter dem Mieter eine schriftliche Abrechnung zu erteilen. Die Abrechnung
muss die einzelnen Ansprüche und deren Grund angeben.

(3) Kommt der Vermieter seiner Pflicht nach Absatz 2 nicht nach, so"""

_TEXTS = {
    "code": _CODE,
    "law": _LAW,
    "medicine": _MEDICINE,
    "story": _STORY,
    "maths": _MATHS,
    "German": _GERMAN,
}

PROMPTS = tuple(WorkloadPrompt(f"built in/{name}", name, text.rstrip()) for name, text in _TEXTS.items())
