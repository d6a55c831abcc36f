"""The questions of the fixtures of evaluation sets, with what a model writes that knows the answers, and one that does not."""

from __future__ import annotations

LANGUAGES = [
    "AR-XY",
    "BN-BD",
    "DE-DE",
    "ES-LA",
    "FR-FR",
    "HI-IN",
    "ID-ID",
    "IT-IT",
    "JA-JP",
    "KO-KR",
    "PT-BR",
    "ZH-CN",
    "SW-KE",
    "YO-NG",
]

# of each question an answer that is right, and one that is wrong; of multiple choice the texts of options
SOLUTIONS: dict[str, tuple[str, str]] = {
    "What is the remainder of 7^10 modulo 1000?": ("249", "250"),
    "How many positive divisors does 2024 have?": ("016", "15"),
    "Find the least prime above 70.": ("71", "73"),
    "Find the sum of the digits of 2^{15}.": ("26", "27"),
    "What is 12^2 - 2?": ("142", "144"),
    "A clock shows 3:15. Find the angle between its hands in degrees.": ("7.5", "0"),
    "Evaluate $\\int_0^1 x\\,dx$.": ("\\frac12", "\\frac13"),
    "Simplify $\\sqrt{8}$.": ("\\sqrt{8}", "4"),
    "Solve $x^2 = 2$.": ("\\sqrt{2}, -\\sqrt{2}", "\\sqrt{2}"),
    "The base of a triangle is 3 and its height 7. Give its area within 0.1.": ("10.45", "10.7"),
    "Find all pairs of positive integers with product 3.": ("(3,1), (1,3)", "(1,3)"),
    "What is the mass of the Sun in grams?": ("2\\times 10^{33}", "2\\times 10^{30}"),
    "Write the energy of a photon of frequency $\\nu$.": ("\\nu h", "\\frac{h}{\\nu}"),
    "What is 7 more than 8?": ("15", "16"),
    "Which of these is prime?": ("7", "9"),
    "Which gas do plants take up?": ("carbon dioxide", "argon"),
    "Which number is even?": ("14", "13"),
    "Which particle mediates electromagnetism?": ("the photon", "the gluon"),
    "What is the spin of the Higgs boson?": ("0", "1/2"),
    **{f"[{language}] 2 + 2 = ?": ("4", "5") for language in ("EN-US", *LANGUAGES)},
}
CHOICES = {
    "Which of these is prime?": ["4", "6", "7", "8", "9", "10", "12", "14", "15", "16"],
    "Which gas do plants take up?": ["argon", "helium", "carbon dioxide"],
    "Which particle mediates electromagnetism?": ["the photon", "the gluon", "the W boson", "the graviton"],
    "What is the spin of the Higgs boson?": ["0", "1/2", "1", "2"],
}
