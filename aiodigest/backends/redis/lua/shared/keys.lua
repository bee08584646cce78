-- keys: the names of a shard's keys.

-- sorted sets: the keys of timelines by the times when they are due, or when their leases end
local waiting, ready, leased = tag .. 'waiting', tag .. 'ready', tag .. 'leased'
-- of those that wait, the ones that were postponed: by the times when they were due, which are theirs again when ready
local postponed = tag .. 'postponed'
-- of each timeline: a list of its entries, a list of those under delivery, a hash of its fields, and, where its log holds
-- records more than once, their ids
local logs, opens, metas, indexes = tag .. 'log:', tag .. 'open:', tag .. 'meta:', tag .. 'ids:'
