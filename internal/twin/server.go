package twin

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"
)

// Serve runs the second end of another process's program, and ends the process. In a process that
// is not for that it returns at once.
func Serve() {
	if os.Getenv(processEnv) == "" {
		return
	}
	s := &server{orders: make(chan order), notices: json.NewEncoder(os.Stdout)}
	go s.listen()
	if err := s.serve(); err != nil {
		s.tell(notice{Failed: err.Error()})
		os.Exit(1)
	}
	select {} // The process ends with its input.
}

// A server runs an end for another process.
type server struct {
	orders chan order

	mu      sync.Mutex
	notices *json.Encoder
}

// listen receives the orders. The process ends when no more can come.
func (s *server) listen() {
	for in := json.NewDecoder(os.Stdin); ; {
		var o order
		if in.Decode(&o) != nil {
			os.Exit(0)
		}
		s.orders <- o
	}
}

// tell reports something. It has left the process when tell returns.
func (s *server) tell(n notice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.notices.Encode(n) != nil {
		os.Exit(1) // The other process has ended.
	}
}

// begins reports that a call that sends has begun, where an end is run for another process.
func (s *server) begins(c Call) {
	if s != nil {
		s.tell(notice{Begun: &c})
	}
}

// exit reports the call that ends the process, and ends it. Nothing is reported behind that.
func (s *server) exit(c Call) {
	s.mu.Lock()
	_ = s.notices.Encode(notice{Call: &c})
	os.Exit(0)
}

// serve runs the end until it is closed.
func (s *server) serve() error {
	t := (<-s.orders).Task
	r := newRun(&t.Machine, t.Program, t.Network)
	r.server = s
	noise, began := NewNoise(), time.Now()
	e, err := r.connectApart(t.Target)
	if err != nil {
		return err
	}
	s.tell(notice{Ready: true})
	start := <-s.orders
	r.start = time.Now()
	r.start = r.start.Add(start.Start - shared(r.start))
	go s.obey(r, e)
	e.play()
	s.tell(notice{Done: true, Noise: noise.Since(began)})
	return nil
}

// obey closes the end when the other process says so. If a call does not return after that, the
// stacks say where it is.
func (s *server) obey(r *run, e player) {
	<-s.orders
	close(r.over)
	time.AfterFunc(hangTime*3/4, func() {
		buf := make([]byte, 1<<20)
		fmt.Fprintf(os.Stderr, "hangs:\n%s", buf[:runtime.Stack(buf, true)])
	})
	e.close(Closing)
}

// connectApart connects the second end, which is the only one in this process.
func (r *run) connectApart(target string) (player, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if target != "" {
		return r.dial(ctx, 1, target)
	}
	ln, err := r.listen(ctx, 1)
	if err != nil {
		return nil, err
	}
	defer ln.close()
	r.server.tell(notice{Address: ln.addr})
	return ln.accept()
}
