package shmring

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
)

// memory returns n bytes that are aligned as a page is.
func memory(n int) []byte {
	b := make([]uint64, n/8)
	return unsafe.Slice((*byte)(unsafe.Pointer(&b[0])), n)
}

func pair() (w *Writer, r *Reader, ours, theirs Page) {
	ours, theirs = NewPage(memory(PageSize)), NewPage(memory(PageSize))
	return NewWriter(ours, theirs), NewReader(theirs, ours), ours, theirs
}

// All bytes arrive in their order, however they are cut, through rings of all sizes.
func TestCarries(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	w, r, _, _ := pair()
	data := make([]byte, 4<<20)
	for i := range data {
		data[i] = byte(rnd.Uint32())
	}
	var rings [][]byte // rings are those that the peer has been given.
	var got []byte
	for left := data; len(got) < len(data); {
		if rnd.IntN(20) == 0 && w.CanMove() {
			if w.Small() || rnd.IntN(2) == 0 {
				mem := memory(MinRing << rnd.IntN(6))
				rings = append(rings, mem)
				w.Move(mem)
			} else {
				w.Move(nil)
			}
		}
		k := min(len(left), rnd.IntN(100000))
		half := rnd.IntN(k + 1)
		n, _, err := w.Write([][]byte{left[:half], left[half:k]})
		require.NoError(t, err)
		left = left[n:]
		for range rnd.IntN(3) {
			next, err := r.Peek()
			require.NoError(t, err)
			switch next {
			case Bytes:
				b := make([]byte, 1+rnd.IntN(100000))
				n, _, err := r.Read([][]byte{b[:len(b)/2], b[len(b)/2:]})
				require.NoError(t, err)
				require.Positive(t, n)
				got = append(got, b[:n]...)
			case Moved:
				size, err := r.NextRing()
				require.NoError(t, err)
				if size == 0 {
					r.Follow(nil)
					break
				}
				require.Len(t, rings[0], size)
				r.Follow(rings[0])
				rings = rings[1:]
			}
		}
	}
	defect.Bytes(t, data, got)
	require.True(t, w.Empty())
	w.End(Finished)
	next, err := r.Peek()
	require.NoError(t, err)
	require.Equal(t, Ended, next)
	require.Equal(t, Finished, r.Ending())
}

// What is written and read by turns stays at the beginning of the ring.
func TestTouchesLittle(t *testing.T) {
	w, r, _, _ := pair()
	mem := memory(1 << 16)
	w.Move(mem)
	r.Follow(mem)
	b := make([]byte, 100)
	for range 10000 {
		n, _, err := w.Write([][]byte{bytes.Repeat([]byte{1}, 70)})
		require.NoError(t, err)
		require.Equal(t, 70, n)
		n, _, err = r.Read([][]byte{b})
		require.NoError(t, err)
		require.Equal(t, 70, n)
	}
	require.Zero(t, bytes.Count(mem[70:], []byte{1}))
}

// Two goroutines that sleep as the doorbell allows never miss each other.
func TestWakes(t *testing.T) {
	w, r, _, _ := pair()
	readerBell, writerBell := make(chan struct{}, 100), make(chan struct{}, 100)
	const total = 2 << 20
	done := make(chan int)
	go func() {
		sum := 0
		rnd := rand.New(rand.NewPCG(3, 4))
		for n := 0; n < total; {
			b := make([]byte, 1+rnd.IntN(300))
			k, wake, err := r.Read([][]byte{b})
			if err != nil {
				t.Error(err)
			}
			if wake {
				writerBell <- struct{}{}
			}
			for _, c := range b[:k] {
				sum += int(c)
			}
			if n += k; k == 0 && !r.Sleep() {
				<-readerBell
				r.Awake()
			}
		}
		done <- sum
	}()
	sum := 0
	rnd := rand.New(rand.NewPCG(5, 6))
	for n := 0; n < total; {
		b := make([]byte, min(total-n, 1+rnd.IntN(3000)))
		for i := range b {
			b[i] = byte(n + i)
			sum += int(b[i])
		}
		n += len(b)
		for len(b) > 0 {
			k, wake, err := w.Write([][]byte{b})
			require.NoError(t, err)
			if wake {
				readerBell <- struct{}{}
			}
			if b = b[k:]; len(b) > 0 && !w.Sleep(len(b)) {
				<-writerBell
				w.Awake()
			}
		}
		if rnd.IntN(10) == 0 {
			runtime.Gosched()
		}
	}
	if got := <-done; got != sum {
		t.Fatal(defect.Wrong("their sum is %d and not %d", got, sum))
	}
}

// Buffers are written in their order, also if the reader makes room in the middle of a call.
func TestOrderOfBuffers(t *testing.T) {
	w, r, _, _ := pair()
	const each, total = 1000, 4 << 20
	done := make(chan bool)
	go func() {
		ok := true
		b := make([]byte, 700)
		for pos := 0; pos < total; {
			n, _, err := r.Read([][]byte{b})
			ok = ok && err == nil
			for i := range n {
				ok = ok && b[i] == byte((pos+i)/each)
			}
			pos += n
		}
		done <- ok
	}()
	data := make([]byte, total)
	for i := range data {
		data[i] = byte(i / each)
	}
	for len(data) > 0 {
		var bufs [][]byte
		for at := 0; at < min(len(data), 8*each); at += each {
			bufs = append(bufs, data[at:min(at+each, len(data))])
		}
		n, _, err := w.Write(bufs)
		require.NoError(t, err)
		data = data[n:]
	}
	if !<-done {
		t.Fatal(defect.Wrong("they are not in the order of the buffers"))
	}
}

// FuzzPeer has a peer store anything into its page between the calls of an honest end,
// which finds an error or goes on, and touches only what is its own.
func FuzzPeer(f *testing.F) {
	f.Add([]byte{0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1})
	f.Add([]byte{32, 1, 36, 0, 40, 0, 0, 5, 128, 200, 2, 3})
	f.Fuzz(func(t *testing.T, program []byte) {
		own, hostile := memory(PageSize), memory(PageSize)
		w, r := NewWriter(NewPage(own), NewPage(hostile)), NewReader(NewPage(own), NewPage(hostile))
		var ring []byte
		buf := make([]byte, 5000)
		for len(program) >= 2 {
			op, arg := program[0], program[1]
			program = program[2:]
			switch op % 8 {
			case 0, 1: // one byte of the words
				hostile[int(arg)*2%512+int(op>>3)&1] = op >> 4
			case 2:
				if n, _, err := w.Write([][]byte{buf[:int(arg)*17]}); n > int(arg)*17 || err != nil && err != ErrCorrupt {
					t.Fatal(n, err)
				}
			case 3:
				if n, _, err := r.Read([][]byte{buf[:int(arg)*17]}); n > int(arg)*17 || err != nil && err != ErrCorrupt {
					t.Fatal(n, err)
				}
			case 4:
				if next, err := r.Peek(); err == nil && next == Moved {
					if n, err := r.NextRing(); err == nil && n == 0 {
						r.Follow(nil)
					} else if err == nil {
						r.Follow(make([]byte, n))
					}
				}
			case 5:
				if w.CanMove() {
					ring = memory(MinRing << (arg % 5))
					w.Move(ring)
				}
			case 6:
				if w.CanMove() {
					w.Move(nil)
				}
			case 7:
				w.Sleep(int(arg))
				r.Sleep()
				w.Awake()
				r.Awake()
			}
		}
	})
}
