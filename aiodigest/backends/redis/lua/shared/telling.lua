-- telling: an answer of names and numbers, the counters of a shard among them.

local COUNTERS = {'digests', 'delivered', 'dropped', 'aged', 'expired', 'buried', 'letters_dropped'}
local told = {}

local function tell(name, number)
  if number then
    told[#told + 1] = name
    told[#told + 1] = number
  end
end
