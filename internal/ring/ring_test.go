package ring

import "testing"

// The queue against a slice, through growth and wrap-around.
func TestRingAgainstSlice(t *testing.T) {
	var r Ring[int]
	var model []int
	for i := range 10000 {
		if i%7 < 4 || len(model) == 0 {
			r.Push(i)
			model = append(model, i)
		} else {
			if got := r.Pop(); got != model[0] {
				t.Fatalf("popped %d, want %d", got, model[0])
			}
			model = model[1:]
		}
		if i%13 == 0 {
			r.Trim()
			if max(4, 2*len(model)) < len(r.buf) {
				t.Fatalf("%d elements keep memory for %d", len(model), len(r.buf))
			}
		}
		if r.Len() != len(model) {
			t.Fatalf("length %d, want %d", r.Len(), len(model))
		}
		for k := range model {
			if *r.At(k) != model[k] {
				t.Fatalf("element %d is %d, want %d", k, *r.At(k), model[k])
			}
		}
		if len(model) > 50 {
			model = model[:0]
			for r.Len() > 0 {
				r.Drop()
			}
		}
	}
}

func TestNextKeepsMemoryAndPopForgets(t *testing.T) {
	var r Ring[[]byte]
	*r.Next() = make([]byte, 0, 100)
	r.Drop()
	for range 3 {
		r.Push(nil)
		r.Drop()
	}
	if cap(*r.Next()) != 100 {
		t.Error("the memory of a dropped element was not handed out again")
	}
	r.Pop()
	for range 3 {
		r.Push(nil)
		r.Drop()
	}
	if *r.Next() != nil {
		t.Error("a popped element was kept")
	}
	r.Undo()
	if r.Len() != 0 {
		t.Error("Undo did not take Next back")
	}
}
