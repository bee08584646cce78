-- telling: an answer of names and numbers, the counters of a shard among them.

local COUNTERS = {
  'digests', 'delivered', 'dropped', 'aged', 'expired', 'buried', 'letters_dropped', 'duplicates', 'muted',
}
local told = {}

-- Return a counter of the shard; nil if it is not there, or another program has written no number.
local function read_counter(name)
  local value = call('HGET', layout, name)
  return value and #value < 16 and string.find(value, '^%d+$') and tonumber(value) or nil
end

local function tell(name, number)
  if number then
    told[#told + 1] = name
    told[#told + 1] = number
  end
end
