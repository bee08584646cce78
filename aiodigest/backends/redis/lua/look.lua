-- look: show timelines; a broken one shows its error.
--
-- Flags     repeatable
-- Parts     look
-- Commands  HGET HGETALL HLEN HMGET LLEN TIME ZCOUNT ZRANGE ZSCORE
-- Reply     [[list...], list]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   state (text): to look at a page of those in its set, or of all that are muted, or '' for one
-- ARGV[4]   which (text): key of the one, or how many of the set
-- ARGV[5]   score (text): after which to begin, '' for the first page
-- ARGV[6]   after (text): key after which to begin
-- ARGV[7]   last (text): highest score to list, '' in the first page
-- Returns   for each: key, state, due (ms), entries in the log, entries opened, attempt, iteration, dropped, end of the
--           cool-down (ms), digest id, last error, last digest or opening (ms), when it was due then (ms), when what came
--           since is due (ms), until when it is postponed (ms), whether a flush waits for the end of its delivery, whether
--           its digest passes hours, what it needs, end of its mute (ms; 0: none, -1: it is not muted), whether what is
--           added is dropped; and the last three arguments for the next page: none, if this is the last one. Of one
--           without records: nothing unless it is muted, and if it is in a cool-down its iteration, the end of that (ms)
--           and the last digest (ms)
--
-- Needs     guard clock timelines state listing mutes

local state, which, score, after, last = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]

-- Return a time of the shard's clock by the server's; 0 if there is none.
local function told(time)
  return time and time > 0 and time - shift or 0
end

-- Return the number of the try that is under way, or else was the last with an outcome.
local function tries(held)
  return held.attempts + (held.token and 1 or 0)
end

local function window(key, state, score)
  local put_aside = state == 'waiting' and tonumber(call('ZSCORE', postponed, key))
  local held, problem = load_all(key)
  local ends, drops = mute_of(key)
  if not held then -- what its meta tells is told all the same: `reschedule` begins with its iteration
    held = load(key) or thaw(key, {})
    held.error, held.dropped, held.open_dropped = problem, 0, 0
  end
  local due = put_aside or score
  due = state == 'muted' and math.max(due, ends or 0) or due
  due = due < NEVER_MS and due - shift or due
  return {
    key, state, due, held.logged, held.opened, tries(held), held.iteration,
    held.dropped + held.open_dropped, told(held.cool), held.id or '', held.error or '', told(held.last),
    told(held.opening), told(held.next), put_aside and score - shift or 0, held.flush and 1 or 0, held.pass and 1 or 0,
    held.needs or '', ends and (ends < NEVER_MS and ends - shift or 0) or -1, drops and 1 or 0,
  }
end

if state == '' then
  local found, due = state_of(which)
  local held = not found and load(which)
  if not found and mute_of(which) then
    found, due = 'muted', 0
  end
  local cools = held and held.cool > now
  return {found and {window(which, found, due)} or {}, cools and {held.iteration, told(held.cool), told(held.last)} or {}}
end
local windows = {}
local members, rest = page(state == 'muted' and mutes or tag .. state, tonumber(which), score == '' and '-inf' or score, after, last)
for index = 1, #members, 2 do
  local found, due = state, tonumber(members[index + 1])
  if state == 'muted' then
    found, due = state_of(members[index])
  end
  windows[#windows + 1] = window(members[index], found or 'muted', due or 0)
end
return {windows, rest}
