package iwarpwire

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSameHost(t *testing.T) {
	private := []byte("private")
	for _, now := range []bool{false, true} {
		o := SameHostOffer{Host: [16]byte{1, 15: 2}, Now: now}
		b := o.Append(bytes.Clone(private))
		require.Len(t, b, len(private)+SameHostOfferLen)
		got, o2, ok := CutSameHostOffer(b)
		require.True(t, ok)
		require.Equal(t, private, got)
		require.Equal(t, o, o2)

		a := SameHostAnswer{Name: [16]byte{3, 15: 4}, Token: [16]byte{5, 15: 6}, Now: now}
		b = a.Append(nil)
		require.Len(t, b, SameHostAnswerLen)
		got, a2, ok := CutSameHostAnswer(b)
		require.True(t, ok)
		require.Empty(t, got)
		require.Equal(t, a, a2)

		for i := range SameHostAnswerLen {
			_, _, ok := CutSameHostAnswer(b[i+1:])
			require.False(t, ok, "%d bytes missing", i+1)
		}
		b[len(b)-5]++
		_, _, ok = CutSameHostAnswer(b)
		require.False(t, ok, "another version")
	}
}

// What is cut off is encoded the same way again, but for unknown flags, and the rest is
// the program's.
func FuzzSameHost(f *testing.F) {
	f.Add((&SameHostOffer{Now: true}).Append([]byte("x")))
	f.Add((&SameHostAnswer{}).Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		flags := func() []byte {
			c := bytes.Clone(b)
			c[len(c)-sameHostTail] &= sameHostNow
			return c
		}
		if private, o, ok := CutSameHostOffer(b); !ok {
			require.Equal(t, b, private)
		} else if got := o.Append(bytes.Clone(private)); !bytes.Equal(got, flags()) {
			t.Errorf("%x became %x", b, got)
		}
		if private, a, ok := CutSameHostAnswer(b); !ok {
			require.Equal(t, b, private)
		} else if got := a.Append(bytes.Clone(private)); !bytes.Equal(got, flags()) {
			t.Errorf("%x became %x", b, got)
		}
	})
}
