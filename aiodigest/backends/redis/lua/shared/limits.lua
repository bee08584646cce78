-- limits: the bounds of a timeline, "capacity max_size max_age ttl", times in ms.

local function parse_limits(text)
  local capacity, max_size, max_age, ttl = string.match(text, '^(%d+) (%d+) (%d+) (%d+)$')
  return {
    capacity = tonumber(capacity), max_size = tonumber(max_size), max_age = tonumber(max_age), ttl = tonumber(ttl),
  }
end
