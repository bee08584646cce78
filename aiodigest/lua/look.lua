-- look: what timelines look like; a broken one shows its error.
--
-- ARGV[3]  state, to look at those in its set, or '' for one
-- ARGV[4]  key of the one, or the first of the set, from 0
-- ARGV[5]  how many of the set
-- Returns  for each: key, state, due (ms), entries in the log, entries opened, attempt, iteration, dropped,
--          cool-down's end (ms), digest id, last error

local function window(key, state, due)
  local held, problem = load_all(key)
  if not held then
    return {key, state, due, 0, 0, 0, 0, 0, 0, '', problem}
  end
  return {
    key, state, due, held.logged, held.id and held.opened or 0, held.attempts, held.iteration,
    held.dropped + held.open_dropped, held.cool, held.id or '', held.error or '',
  }
end

if ARGV[3] == '' then
  local state, due = state_of(ARGV[4])
  return state and {window(ARGV[4], state, due)} or {}
end
local windows = {}
local start = tonumber(ARGV[4])
local members = call('ZRANGE', tag .. ARGV[3], start, start + tonumber(ARGV[5]) - 1, 'WITHSCORES')
for index = 1, #members, 2 do
  windows[#windows + 1] = window(members[index], ARGV[3], tonumber(members[index + 1]))
end
return windows
