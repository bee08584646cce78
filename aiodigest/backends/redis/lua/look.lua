-- look: what timelines look like; a broken one shows its error.
--
-- ARGV[3]  state, to look at a page of those in its set, or '' for one
-- ARGV[4]  key of the one, or how many of the set
-- ARGV[5]  score after which to begin, '' for the first page
-- ARGV[6]  key after which to begin
-- ARGV[7]  highest score to list, '' in the first page
-- Returns  for each: key, state, due (ms), entries in the log, entries opened, attempt, iteration, dropped,
--          cool-down's end (ms), digest id, last error; and the last three arguments for the next page: none, if this
--          is the last one

local function window(key, state, due)
  local held, problem = load_all(key)
  if not held then
    return {key, state, due, 0, 0, 0, 0, 0, 0, '', problem}
  end
  return {
    key, state, due, held.logged, held.opened, held.attempts, held.iteration,
    held.dropped + held.open_dropped, held.cool, held.id or '', held.error or '',
  }
end

if ARGV[3] == '' then
  local state, due = state_of(ARGV[4])
  return {state and {window(ARGV[4], state, due)} or {}, {}}
end
local windows = {}
local score = ARGV[5] == '' and '-inf' or ARGV[5]
local members, rest = page(tag .. ARGV[3], tonumber(ARGV[4]), score, ARGV[6], ARGV[7])
for index = 1, #members, 2 do
  windows[#windows + 1] = window(members[index], ARGV[3], tonumber(members[index + 1]))
end
return {windows, rest}
