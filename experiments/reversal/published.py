"""The published comparison of four scores on string reversal, one training each.

Source: chapter 38 ("Attention Variants"), §38.6: a GRU encoder-decoder. The chapter calls these
numbers "exact match"; they are shares of letters that are right when every earlier letter is given.
"""

# {score: {length of the strings: share of letters right}}
LETTERS_RIGHT = {
    "additive": {3: 0.9956, 5: 0.9893, 7: 1.0, 10: 0.946},
    "dot": {3: 0.4133, 5: 0.8213, 7: 0.8943, 10: 0.8807},
    "general": {3: 0.5156, 5: 0.8240, 7: 0.8829, 10: 0.8947},
    "scaled": {3: 0.3911, 5: 0.1653, 7: 0.3038, 10: 0.12},
}
