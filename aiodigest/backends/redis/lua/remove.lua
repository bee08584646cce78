-- remove: drop a record from the log, and from an open log in a retry wait after reported failures.
--
-- ARGV[3]  key
-- ARGV[4]  record id
-- ARGV[5]  limits: "capacity max_size max_age ttl", ms
-- ARGV[6]  nonce, which names the digest whose contents change
-- Returns  1 if a record went, else 0; the text of an error if the timeline is broken

local key, record_id, limits, nonce = ARGV[3], ARGV[4], parse_limits(ARGV[5]), ARGV[6]
local held, problem = load_all(key)
if not held then
  return problem
end
if held.logged + held.opened == 0 then
  return 0
end

-- `kept` without the record, and whether it was there.
local function without(kept, length)
  local rest = {}
  for index = 1, length do
    if identity(kept[index]) ~= record_id then
      rest[#rest + 1] = kept[index]
    end
  end
  return rest, #rest < length
end

-- trimmed first, so that a record which the capacity had dropped does not come back in the removed one's place
local records = collect({}, {}, log_of(key), held.logged)
local left = math.min(#records, limits.capacity)
local rest, removed = without(records, left)
if #rest < held.logged then
  rewrite(log_of(key), rest, #rest, lifetime(held, limits.ttl))
  held.logged = #rest
end
held.dropped = held.dropped + #records - left
count('dropped', #records - left)

if held.id and not held.frozen and not held.token and call('ZSCORE', waiting, key) then
  local opened = {}
  for start = 0, held.opened - 1, SLICE do
    for _, entry in ipairs(call('LRANGE', open_of(key), start, start + SLICE - 1)) do
      table.insert(opened, entry)
    end
  end
  local newest_first = {}
  for index = #opened, 1, -1 do
    newest_first[#newest_first + 1] = opened[index]
  end
  local still, went = without(newest_first, #newest_first)
  if went then
    removed = true
    held.id = nonce
    rewrite(open_of(key), still, #still, lifetime(held, limits.ttl))
    if #still == 0 then
      end_delivery(held)
      settle(held, limits.max_size, limits.ttl)
    end
  end
end
if held.logged + held.opened == 0 and not held.id then
  settle(held, limits.max_size, limits.ttl)
end
save(held)
finish()
return removed and 1 or 0
