-- keys: the names of a shard's keys.

-- sorted sets: the keys of timelines by the times when they are due, or when their leases end
local waiting, ready, leased = tag .. 'waiting', tag .. 'ready', tag .. 'leased'
-- of each timeline: a list of its entries, a list of those under delivery, and a hash of its fields
local logs, opens, metas = tag .. 'log:', tag .. 'open:', tag .. 'meta:'
