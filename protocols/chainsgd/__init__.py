"""MDLdroid's ChainSGD-reduce: peers combine their models in pairs, and the result comes back along a binomial tree.

===========  ====================================================================================
`group`      `Group`: averaging in an ordinary training loop, blocking
`machine`    `ChainGroup`: the machine of a peer that hands in models and gets averages
`training`   `ChainSGD`: the same for the paper's synchronous training
`member`     joining, links, leaving
`device`     a device in an attempt, as planned by the agent
`reduction`  merging, passing on and receiving segments
`agent`      the mobile agent: members; `rounds`, what they do and what happens in case of faults
`schedule`   who sends to whom
`broadcast`  the binomial tree
`messages`   what peers say to each other
===========  ====================================================================================
"""
