package defect

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"testing/iotest"
)

func TestDiffer(t *testing.T) {
	long := bytes.Repeat([]byte{7}, 100)
	changed := bytes.Clone(long)
	changed[98], changed[99] = 8, 9
	for name, test := range map[string]struct {
		want, got []byte
		text      string // text is empty if they do not differ.
	}{
		"equal":              {long, bytes.Clone(long), ""},
		"nothing":            {nil, []byte{}, ""},
		"nothing came":       {long, nil, "bytes lost: 0 of 100 came, all as they were sent"},
		"the end is missing": {long, long[:99], "bytes lost: 99 of 100 came, all as they were sent"},
		"too many":           {long[:99], long, "bytes too many: 100 came, the first 99 as they were sent"},
		"others":             {long, changed, "bytes are wrong: the first of 2 at offset 98 is 0x08 and not 0x07"},
		"others and fewer":   {long, changed[:99], "bytes are wrong: the first of 1 at offset 98 is 0x08 and not 0x07, and 99 came where 100 were sent"},
		"others and more":    {long[:99], changed, "bytes are wrong: the first of 1 at offset 98 is 0x08 and not 0x07, and 100 came where 99 were sent"},
		"short ones":         {[]byte("ping"), []byte("pong"), `bytes are wrong: the first of 1 at offset 1 is 0x6f and not 0x69: "pong" and not "ping"`},
	} {
		err := Differ(test.want, test.got)
		if test.text == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		} else if err == nil || err.Error() != "DEFECT: "+test.text {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestReadFull(t *testing.T) {
	late := func(s string) io.Reader {
		return io.MultiReader(strings.NewReader(s), iotest.ErrReader(os.ErrDeadlineExceeded))
	}
	for name, test := range map[string]struct {
		from   io.Reader
		defect string // defect begins with a defect's description.
		err    error
	}{
		"all":                      {strings.NewReader("sent, and more"), "", nil},
		"the end at once":          {strings.NewReader(""), "bytes lost: 0 of 4", nil},
		"the end":                  {strings.NewReader("sen"), "bytes lost: 3 of 4", nil},
		"wrong bytes":              {strings.NewReader("send"), "bytes are wrong: ", nil},
		"an error":                 {late("sen"), "", os.ErrDeadlineExceeded},
		"wrong bytes and an error": {late("san"), "bytes are wrong: ", nil},
	} {
		err := ReadFull(test.from, "sent")
		if test.defect == "" {
			if !errors.Is(err, test.err) {
				t.Errorf("%s: %v", name, err)
			}
		} else if err == nil || !strings.HasPrefix(err.Error(), "DEFECT: "+test.defect) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
