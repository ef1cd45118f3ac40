package twin

// Shrink makes a program that fails smaller, as long as it still fails. fails reports
// whether a program does. The number of its calls is bounded.
func Shrink(p *Program, attempts int, fails func(p *Program) bool) *Program {
	best := p.clone()
	try := func(q *Program) bool {
		if attempts <= 0 {
			return false
		}
		attempts--
		if fails(q) {
			best = q
			return true
		}
		return false
	}
	for changed := true; changed && attempts > 0; {
		changed = false
		// Whole lanes are removed first, then halves of them, then single operations.
		for i := range best.lanes() {
			for span := len(*best.lanes()[i]); span > 0; span /= 2 {
				for at := 0; at < len(*best.lanes()[i]); {
					q := best.clone()
					l := q.lanes()[i]
					*l = append((*l)[:at:at], (*l)[min(len(*l), at+span):]...)
					if q.sound() && try(q) {
						changed = true
					} else {
						at += span
					}
				}
			}
		}
		for i := range best.Link.Faults {
			if i < len(best.Link.Faults) {
				q := best.clone()
				q.Link.Faults = append(q.Link.Faults[:i:i], q.Link.Faults[i+1:]...)
				changed = try(q) || changed
			}
		}
		for i := range best.Suspends {
			if i < len(best.Suspends) {
				q := best.clone()
				q.Suspends = append(q.Suspends[:i:i], q.Suspends[i+1:]...)
				changed = try(q) || changed
			}
		}
		for _, simpler := range simplifications {
			q := best.clone()
			simpler(q)
			if q.GoString() != best.GoString() {
				changed = try(q) || changed
			}
		}
		for i := range best.lanes() {
			for j := range *best.lanes()[i] {
				for _, smaller := range reductions {
					q := best.clone()
					op := &(*q.lanes()[i])[j]
					if was := *op; !smaller(op) || *op == was {
						continue
					}
					changed = try(q) || changed
				}
			}
		}
	}
	return best
}

// sound reports whether the program is still a valid one: the peer that is to break the
// protocol does so.
func (p *Program) sound() bool {
	return p.Peer != Breaking || p.Other.has(Malformed)
}

// simplifications remove what is around the operations.
var simplifications = []func(p *Program){
	func(p *Program) { p.First.Setup, p.Other.Setup = Setup{}, Setup{} },
	func(p *Program) { p.First.Setup = Setup{} },
	func(p *Program) { p.Other.Setup = Setup{} },
	func(p *Program) { p.Link.Delay, p.Link.Rate = 0, 0 },
	func(p *Program) { p.Link.Delay = 0 },
	func(p *Program) { p.Link.Rate = 0 },
	func(p *Program) { p.Swap = false },
	func(p *Program) { p.Apart = p.Other.has(Exit) || len(p.Suspends) > 0 },
	func(p *Program) {
		for i := range 2 {
			s := &p.end(i).Setup
			s.MaxSegment, s.MaxFragmentedSize, s.InitialCredits, s.MaxCredits = 0, 0, 0, 0
		}
	},
	func(p *Program) {
		for i := range 2 {
			s := &p.end(i).Setup
			s.NoRDMARead, s.TransferMemory = false, 0
		}
	},
}

// reductions make an operation smaller, and report whether they apply.
var reductions = []func(op *Op) bool{
	func(op *Op) bool { op.Memory = Heap; return true },
	func(op *Op) bool {
		if !op.Do.writes() || op.Do == Malformed {
			return false
		}
		op.Do, op.Part = Write, 0
		return true
	},
	func(op *Op) bool {
		if !op.Do.reads() {
			return false
		}
		op.Do = Read
		op.Part = 0
		return true
	},
	func(op *Op) bool {
		if op.Do == Malformed || op.Do == Meet || op.Size < 2 {
			return false
		}
		op.Size /= 2
		return true
	},
	func(op *Op) bool {
		if op.Do == Malformed || op.Do == Meet || op.Size < 8 {
			return false
		}
		op.Size -= op.Size / 4
		return true
	},
	func(op *Op) bool { op.Wait /= 2; return true },
}
